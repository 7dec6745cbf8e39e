"""A fuzzer of everything that edgeinfer reads: files, command lines and Python options.

``python -m tests.fuzz --seconds 170 --seed 1`` runs cases until the time is over, ``--cases N`` so many. Cases run in
worker processes, which the supervisor watches from outside. A case is made from the seed, its target and its number
alone, so that ``--replay bundle:4711`` runs it again. Whatever it does must end in success or in an error of ours.
"""
