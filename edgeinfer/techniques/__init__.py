"""edgeinfer.techniques: techniques that are neither sparse feed-forward layers nor weights in storage.

Each module has one `edgeinfer.technique.Technique`, by the name `TECHNIQUE`. It imports its needs where they are used:
the command line reads all of them for the help.
"""
