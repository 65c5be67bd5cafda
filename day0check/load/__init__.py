"""Load generation and the streaming client of `day0check endpoint`. Traffic goes to the one given address only."""
