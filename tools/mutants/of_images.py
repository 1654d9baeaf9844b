"""Planted bugs in how images get into prompts, stay whole there, and are read from requests."""

from tools.mutants.mutant import Mutant

_LAWS = ("tests/cache/test_laws.py", "-k", "images_are_reused")
_PLAN = ("tests/plan",)
_SCHEDULE = ("tests/schedule",)
_DISK = ("tests/disk/test_cache.py", "-k", "middle_of_an_image")
_CHAT = ("tests/chat/test_images.py",)
_FILES = ("tests/core/test_image_files.py",)
_APIS = ("tests/api/test_seen_images.py",)
_HOSTILE = ("tests/api/test_hostile_images.py",)


def _mutant(function: str, name: str, old: str, new: str, tests: tuple[str, ...]) -> Mutant:
    return Mutant(name=name, function=function, old=old, new=new, tests=tests)


IMAGE_MUTANTS = (
    _mutant(
        "resume_position",
        "a request resumes inside an image",
        "outside(position, spans)",
        "position",
        _LAWS,
    ),
    _mutant(
        "resume_position",
        "an image whose start is not resumable is resumed at",
        "if found == position:\n    return position",
        "return outside(found, spans)",
        ("tests/cache/test_laws.py", "-k", "checkpoint_inside_an_image"),
    ),
    _mutant(
        "make_plan",
        "a checkpoint inside an image",
        "Boundary(outside(b.position, spans), b.kind)",
        "b",
        _PLAN,
    ),
    _mutant(
        "make_plan",
        "a checkpoint every so many tokens, also inside an image",
        "at = outside(position, spans)",
        "at = position",
        _PLAN,
    ),
    _mutant(
        "divergence_point",
        "a request waits for a position inside an image",
        "outside(min(common, reach, follower.prompt_len - 1), follower.spans)",
        "min(common, reach, follower.prompt_len - 1)",
        _SCHEDULE,
    ),
    _mutant(
        "DiskCache.find",
        "the disk is read up to the middle of an image",
        "(limit := outside(found.position, spans)) == found.position",
        "True",
        _DISK,
    ),
    _mutant(
        "Prompt.up_to",
        "a prompt that is cut ends in an image",
        "end = outside(position, self.spans)",
        "end = position",
        ("tests/core/test_images.py",),
    ),
    _mutant(
        "TokenHistory.append",
        "ids of images are drafted from",
        "tokens = np.maximum(tokens, _GAP)",
        "",
        ("tests/drafts/test_history.py", "-k", "image"),
    ),
    _mutant(
        "ChatTemplate.text",
        "a marker in somebody's words is an image",
        "return self._images.without_markers(text)",
        "return text",
        _CHAT,
    ),
    _mutant(
        "SeenImages.written",
        "the text does not tell images apart",
        "seen.tag",
        "PROBE.tag",
        _CHAT,
    ),
    _mutant(
        "AbridgedChat._short",
        "images that are left out do not count",
        "len(images_in(messages)) != len(images_in(own))",
        "False",
        _CHAT,
    ),
    _mutant(
        "PieceTokenizer._after_piece",
        "a spelling is found behind any image",
        "return chain if rest == '' else _after(chain, rest)",
        "return _after(0, rest)",
        _CHAT,
    ),
    _mutant(
        "_classify_image",
        "an image that was left out is taken for a changed one",
        "Reason.IMAGE_CHANGED if is_new else Reason.IMAGE_DROPPED",
        "Reason.IMAGE_CHANGED",
        _CHAT,
    ),
    _mutant(
        "ImageParts.read",
        "an image is fetched from any host",
        "_host_of(text) in self._limits.hosts",
        "True",
        _APIS,
    ),
    _mutant(
        "ImageFetcher._get",
        "a redirect leads anywhere",
        "host not in self.hosts",
        "False",
        _APIS,
    ),
)
