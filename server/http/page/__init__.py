"""The pages at / and /docs: HTML, styles and scripts, each page put together into one answer.

`vendored/` has marked (npm, MIT licence) as it is published; it finds the structure of Markdown.
"""
