"""The ground that everything stands on: values, files, locks, this process."""
