"""The smallest cases in which the entries show."""
