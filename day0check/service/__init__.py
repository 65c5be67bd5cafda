"""A service as a whole: starts our server, asks an endpoint everything, holds what came against the reference."""
