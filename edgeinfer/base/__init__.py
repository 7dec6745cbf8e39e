"""The ground that everything is on: values, files, locks, this process."""
