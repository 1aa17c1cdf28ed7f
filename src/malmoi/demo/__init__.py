"""The demo: the whole workflow on built-in text, from the plan through the run to the page."""
