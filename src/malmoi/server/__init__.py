"""Models behind HTTP: an OpenAI-compatible API, and the studio page. Needs the extra `serve`."""
