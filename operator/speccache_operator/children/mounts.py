"""Where a model's files are, for the builders of pods: which claim, where it is mounted, which folder."""

from dataclasses import dataclass

from speccache_api import names
from speccache_api.spec import Spec
from speccache_api.uris import claim_and_folder
from speccache_api.wire import model_path


@dataclass(frozen=True, slots=True)
class ModelMount:
    """One model on a claim, whose root is mounted at `mount_path`; the model itself is at `path`.

    `field` is the path in the resource that named it.
    """

    claim: str
    mount_path: str
    path: str
    field: str


def model_mounts(spec: Spec) -> tuple[ModelMount, ...]:
    """The models that are on claims: target, then draft. Built-in models are in the image and need no mount."""
    found = [_mount(spec.model.uri, names.TARGET_MODEL_PATH, "spec.model.uri")]
    if spec.draft is not None:
        field = "spec.speculative.draftModel.uri"
        found.append(_mount(spec.draft.uri, names.DRAFT_MODEL_PATH, field))
    return tuple(mount for mount in found if mount is not None)


def _mount(uri: str, mount_path: str, field: str) -> ModelMount | None:
    place, path = claim_and_folder(uri), model_path(uri, mount_path)
    if place is None or path is None:
        return None
    return ModelMount(claim=place[0], mount_path=mount_path, path=path, field=field)
