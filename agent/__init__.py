"""Overnight's deciding half: ranking, search, proposers, git, journal and commands; never imports torch."""
