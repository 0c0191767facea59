"""Proposers: each turns a brief about one target into one candidate kernel file."""
