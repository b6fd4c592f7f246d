"""A model's answer as it grows: which of its text is reasoning, content, or calls of tools.

`syntax` chooses the formats of a model, and makes an `AnswerParser` (`parser`) for each answer. `formats` is the table
of the formats of calls, `think_tags` that of reasoning. A format is a line of data for one of four parsers of `forms`
(`tagged`, `marked`, `call_array`, `pythonic`), or a parser of its own there.
"""
