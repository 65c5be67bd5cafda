"""The engine as a service: an OpenAI-compatible server around one live scheduler in a thread of its own."""
