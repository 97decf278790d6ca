"""The vocabulary of a request and its evidence, and the one seam that answers requests.

`api`, `engine`, `replica`, `router` and `trainer` use these types; none defines its own.
"""
