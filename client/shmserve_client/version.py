"""The version of the one distribution that holds the client and the daemon."""

__version__ = "0.1.0"
