"""The functions of the driver API, chapter by chapter."""
