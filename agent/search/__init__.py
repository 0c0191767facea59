"""The search as pure functions of the journal: which target next, what to do on it, which setting of a kernel."""
