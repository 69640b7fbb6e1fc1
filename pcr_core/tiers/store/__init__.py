"""The SSD tier: one file per chunk, one LMDB index, one writer at a time."""
