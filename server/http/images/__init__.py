"""Images of requests: where they come from, and how they are read off the event loop.

source   an image as a request names it
fetch    those of other hosts, which an operator has allowed
reader   from a source to pixels, in threads of their own, within a bound of memory
"""
