"""What describes the keys of a ddpctl.yaml: the JSON schema for editors, with the fields' documentation."""

from tests.unit.ddpctl.loading import KINDS

from ddpctl.job.schema import json_schema
from ddpctl.job.spec import JobSpec


def test_the_schema_has_the_fields_types_limits_and_defaults() -> None:
    schema = json_schema(KINDS)
    text, value = {"type": ["string", "number"]}, {"type": ["string", "number", "boolean"]}
    assert list(schema["properties"]) == ["job", "target", "targets", "profiles"]
    assert schema["properties"]["targets"]["additionalProperties"]["allOf"][1]["then"] == {
        "type": "object",
        "additionalProperties": False,
        "required": ["kind", "hosts"],
        "properties": {
            "kind": {"const": "ssh"},
            "hosts": {"description": "Where.", "type": ["array", "null"], "items": value},
            "user": {"description": "Who; null: you.", "anyOf": [text, {"type": "null"}], "default": None},
            "check": {"description": "Whether to look first.", "type": "boolean", "default": True},
            "tries": {"description": "How often.", "type": "integer", "minimum": 1, "default": 1},
        },
    }
    job_fields = schema["properties"]["job"]["properties"]
    assert [name for name, field in job_fields.items() if field.get("description")] == [*vars(JobSpec())]
