"""Reports of the commands: JSON objects, tables, pictures."""
