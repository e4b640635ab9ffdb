"""Pure parts: numpy and the standard library, no files, no network, no clock."""
