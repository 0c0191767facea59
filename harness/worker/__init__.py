"""The untrusted side: plain scripts that import neither harness nor agent; loaded by path."""
