"""Named ops: one module per op, the same name as its kernel files and its test."""
