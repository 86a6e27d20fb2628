"""Models that pool: their classes and the files of sentence-transformers."""
