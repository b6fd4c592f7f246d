"""Schemas with wrong values anywhere are read or refused, and never fail the server."""

import json
import random

import pytest
from fuzz_posts import SCHEMAS, hurt

from server.errors import RequestError
from server.grammar.schema import schema_text

VALID = (
    *SCHEMAS,
    {"type": "number", "minimum": 0.5, "exclusiveMaximum": 3, "multipleOf": 0.1, "anyOf": [{"type": "integer"}]},
    {
        "type": ["integer", "null"],
        "exclusiveMinimum": 0,
        "enum": [1, 2],
        "allOf": [{"minimum": 1}],
        "not": {"const": 3},
    },
    {
        "type": "object",
        "properties": {"a": {"type": "string", "format": "time"}},
        "required": ["a"],
        "patternProperties": {"^x": {}},
        "additionalProperties": {"type": "number", "maximum": 3.14},
        "propertyNames": {"type": "string"},
        "dependentRequired": {},
        "if": {},
    },
    {"type": "array", "prefixItems": [{"type": "integer", "minimum": 2}], "contains": True, "minContains": 0},
)


@pytest.mark.parametrize("seed", range(4))
def test_a_hostile_schema_is_read_or_refused(seed: int) -> None:
    rng, num_refused = random.Random(seed), 0
    for _ in range(2000):
        schema = json.loads(json.dumps(rng.choice(VALID)))
        for _ in range(rng.randint(1, 3)):
            schema = hurt(rng, schema)
        try:
            schema_text(schema, "schema")
        except RequestError:
            num_refused += 1
    assert 200 < num_refused < 1800
