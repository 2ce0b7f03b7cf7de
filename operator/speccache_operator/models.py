"""Where a model's files are, for the builders of pods: which claim, which folder in it, where it is mounted."""

from dataclasses import dataclass

from speccache_api import names
from speccache_api.spec import Spec

_SCHEME = "pvc://"


@dataclass(frozen=True, slots=True)
class ModelMount:
    """One model on a claim. `field` is the path in the resource that named it."""

    claim: str
    sub_path: str
    mount_path: str
    field: str


def model_mounts(spec: Spec) -> tuple[ModelMount, ...]:
    """The models that are on claims: target, then draft. Built-in models are in the image and need no mount."""
    found = [_mount(spec.model.uri, names.TARGET_MODEL_PATH, "spec.model.uri")]
    if spec.draft is not None:
        field = "spec.speculative.draftModel.uri"
        found.append(_mount(spec.draft.uri, names.DRAFT_MODEL_PATH, field))
    return tuple(mount for mount in found if mount is not None)


def _mount(uri: str, mount_path: str, field: str) -> ModelMount | None:
    if not uri.startswith(_SCHEME):
        return None
    claim, _, sub_path = uri.removeprefix(_SCHEME).partition("/")
    return ModelMount(claim=claim, sub_path=sub_path, mount_path=mount_path, field=field)
