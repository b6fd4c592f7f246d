"""Base of the models of answers, which the document shows."""

from pydantic import BaseModel, ConfigDict, Field


class Schema(BaseModel):
    """An object of an answer, which has no other fields."""

    model_config = ConfigDict(extra="forbid")


PROVENANCE = Field(None, description="Only where it was asked for; of a stream in the last chunk.")
