"""A conversation as a prompt, for /v1/chat/completions and for the APIs whose requests are translated to a chat.

requests   what a chat may have
tools      its tools: what the model may call, must call and has called
rendering  the text that the model reads
image_places  the tokens of images in a prompt
prepare    from a body to the prompt's tokens, with the grammar and the parser of its answer
"""
