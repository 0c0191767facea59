"""The morning: what a session achieved, as Markdown, as a picture and as one self-contained page."""
