"""Shared by all routes that generate, whatever protocol their clients speak: from a request to pieces of its answer.

requests      fields of texts and chats
structured    the grammar that fields ask for
prompts       token ids of texts
sampling      fields as parameters of the engine
prepared      a valid request with its tokens
jobs          how its jobs are made
admitted      trace, queue, parse, tokenize, admit; and out of the queue again
answer        pieces of all answers to a request, and the kernels it names
pieces        text made of the engine's tokens
event_stream  an answer that is written while it comes
usage         counts
"""
