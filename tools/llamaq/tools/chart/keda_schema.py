"""The shapes of KEDA's custom resources that the chart uses, as JSON schemas. Unknown fields are errors.

KEDA's own definition accepts any metadata of a trigger, and the schemas of Kubernetes do not contain KEDA. The fields
are those of https://keda.sh/docs/2.18/reference/scaledobject-spec/ and the pages of the Redis Streams scalers. A
trigger with `consumerGroup` is an error: it would no longer scale by the length of the stream.
"""

from __future__ import annotations

from typing import Any

from jsonschema import Draft202012Validator

_TEXT = {"type": "string", "minLength": 1}
_COUNT = {"type": "integer", "minimum": 0}
_NUMBER = {"type": "string", "pattern": r"^[0-9]+$"}
_FLAG = {"enum": ["true", "false"]}


def _object(required: dict[str, Any], optional: dict[str, Any] | None = None) -> dict[str, Any]:
    properties = {**required, **(optional or {})}
    return {"type": "object", "required": list(required), "properties": properties, "additionalProperties": False}


_METADATA = _object(
    {"stream": _TEXT, "streamLength": _NUMBER, "enableTLS": _FLAG},
    {"address": _TEXT, "addresses": _TEXT, "sentinelMaster": _TEXT, "databaseIndex": _NUMBER, "unsafeSsl": _FLAG},
) | {"oneOf": [{"required": ["address"]}, {"required": ["addresses"]}]}
_TRIGGER = _object(
    {
        "type": {"enum": ["redis-streams", "redis-cluster-streams", "redis-sentinel-streams"]},
        # A formula names the triggers, so their names are identifiers.
        "name": {"type": "string", "pattern": "^[a-z_][a-z0-9_]*$"},
        "metadata": _METADATA,
    },
    {"authenticationRef": _object({"name": _TEXT})},
)
_MODIFIERS = _object(
    {"formula": _TEXT, "target": _NUMBER},
    {"activationTarget": _NUMBER, "metricType": {"enum": ["AverageValue", "Value"]}},
)
_AUTOSCALER = _object({"behavior": _object({"scaleDown": _object({"stabilizationWindowSeconds": _COUNT})})})
_SCALED_OBJECT = _object(
    {
        "scaleTargetRef": _object({"name": _TEXT}),
        "triggers": {"type": "array", "minItems": 1, "items": _TRIGGER},
        "advanced": _object({"scalingModifiers": _MODIFIERS, "horizontalPodAutoscalerConfig": _AUTOSCALER}),
    },
    dict.fromkeys(("minReplicaCount", "maxReplicaCount", "pollingInterval", "cooldownPeriod"), _COUNT),
)
_SECRET = _object({"parameter": {"enum": ["username", "password"]}, "name": _TEXT, "key": _TEXT})
_SPECS = {
    "ScaledObject": _SCALED_OBJECT,
    "TriggerAuthentication": _object({"secretTargetRef": {"type": "array", "minItems": 1, "items": _SECRET}}),
}


def is_of_keda(manifest: dict[str, Any]) -> bool:
    """Return whether a manifest is one of KEDA's custom resources."""
    return str(manifest["apiVersion"]).startswith("keda.sh/")


def errors_in(manifest: dict[str, Any]) -> list[str]:
    """Return what is wrong with a custom resource of KEDA. Empty: nothing."""
    if manifest["apiVersion"] != "keda.sh/v1alpha1" or manifest["kind"] not in _SPECS:
        return [f"{manifest['apiVersion']} {manifest['kind']} is not a resource of KEDA that the chart knows"]
    found = Draft202012Validator(_SPECS[manifest["kind"]]).iter_errors(manifest["spec"])
    return [f"{manifest['kind']}.spec.{'.'.join(map(str, error.absolute_path))}: {error.message}" for error in found]
