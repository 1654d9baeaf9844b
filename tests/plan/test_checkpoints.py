"""Plans: every boundary of the template gets its checkpoint, and long stretches get theirs at the same places."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from reprise.core.images import ImageFile, PromptImage, outside
from reprise.core.kinds import Full, Layout, Window
from reprise.core.prompt import Boundary, BoundaryKind, Prompt
from reprise.core.tokens import Span, as_tokens
from reprise.plan.checkpoints import Plan, fallback_tokens, interval_tokens, make_plan

HYBRID = Layout(kinds=(Full(),), has_snapshots=True)
TEMPLATE_KINDS = [BoundaryKind.STABLE, BoundaryKind.SYSTEM, BoundaryKind.LAST_USER, BoundaryKind.EXPLICIT]
INTERVAL = 10


SEEN = ImageFile(content=b"", digest=b"", width=1, height=1)


def prompt_of(length: int, boundaries: list[Boundary], spans: list[Span] | None = None) -> Prompt:
    images = tuple(PromptImage(span=span, image=SEEN, rows=1, columns=len(span)) for span in spans or [])
    return Prompt(tokens=as_tokens(range(length)), boundaries=tuple(sorted(boundaries)), images=images)


@st.composite
def plans(draw: st.DrawFn) -> tuple[Prompt, int, list[int], Plan]:
    length = draw(st.integers(2, 120))
    at = st.integers(0, length)
    boundaries = draw(st.lists(st.builds(Boundary, at, st.sampled_from(TEMPLATE_KINDS)), max_size=4, unique=True))
    # An answer never starts inside an image, so the last token is in none.
    cuts = sorted(draw(st.sets(st.integers(0, length - 1), max_size=6)))
    prompt = prompt_of(length, boundaries, [Span(*cuts[at : at + 2]) for at in range(0, len(cuts) - 1, 2)])
    resume_at = outside(draw(st.integers(0, length - 1)), prompt.spans)
    branches = draw(st.lists(at, max_size=2))
    plan = make_plan(prompt, layout=HYBRID, resume_at=resume_at, end=length - 1, branches=branches, interval=INTERVAL)
    return prompt, resume_at, branches, plan


@given(plans())
def test_what_was_asked_for_is_planned_and_nothing_at_or_below_the_resume(drawn) -> None:
    prompt, resume_at, branches, plan = drawn
    end = len(prompt) - 1
    asked = {outside(at, prompt.spans) for at in (*(b.position for b in prompt.boundaries), end, *branches)}
    assert {at for at in asked if resume_at < at <= end} <= set(plan.positions)
    for checkpoint in plan.checkpoints:
        if checkpoint.kind is not BoundaryKind.INTERVAL:
            assert checkpoint.position in asked
    assert plan.resume_at == resume_at and plan.end == end


@given(plans())
def test_long_stretches_have_checkpoints_at_multiples_and_none_close_together(drawn) -> None:
    prompt, resume_at, _, plan = drawn
    if prompt.images:
        return
    for low, high in pairwise([Boundary(resume_at, BoundaryKind.STABLE), *plan.checkpoints]):
        assert high.position - low.position <= 2 * INTERVAL
        if BoundaryKind.INTERVAL in (low.kind, high.kind):
            assert high.position - low.position >= INTERVAL / 2
    assert all(c.position % INTERVAL == 0 for c in plan.checkpoints if c.kind is BoundaryKind.INTERVAL)


@given(plans())
def test_of_several_reasons_for_a_position_the_best_is_kept(drawn) -> None:
    prompt, _, _, plan = drawn
    order = list(BoundaryKind)
    for boundary in prompt.boundaries:
        at = outside(boundary.position, prompt.spans)
        if at in plan.positions:
            assert order.index(plan.kind_at(at)) <= order.index(boundary.kind)


@given(plans())
def test_no_checkpoint_is_inside_an_image(drawn) -> None:
    prompt, _, _, plan = drawn
    assert all(outside(at, prompt.spans) == at for at in plan.positions)


def test_a_long_image_has_one_checkpoint_at_its_start_and_text_behind_it_has_its_own() -> None:
    prompt = prompt_of(120, [], [Span(15, 72)])
    plan = make_plan(prompt, layout=HYBRID, resume_at=0, end=119, branches=[40], interval=INTERVAL)
    assert plan.positions == (15, 80, 90, 100, 110, 119)
    assert plan.kind_at(15) is BoundaryKind.BRANCH


def test_a_position_that_was_not_planned_is_a_branch() -> None:
    plan = Plan(resume_at=0, end=9, checkpoints=(Boundary(4, BoundaryKind.STABLE),))
    assert plan.kind_at(4) is BoundaryKind.STABLE
    assert plan.kind_at(5) is BoundaryKind.BRANCH


def test_a_model_that_resumes_anywhere_needs_no_checkpoints() -> None:
    prompt = prompt_of(100, [Boundary(40, BoundaryKind.STABLE)])
    plan = make_plan(prompt, layout=Layout(kinds=(Full(),)), resume_at=5, end=99, branches=[50], interval=INTERVAL)
    assert plan.positions == () and (plan.resume_at, plan.end) == (5, 99)


def test_windows_are_checkpointed_like_states() -> None:
    prompt = prompt_of(100, [Boundary(40, BoundaryKind.STABLE)])
    windows = Layout(kinds=(Full(), Window(8)))
    plan = make_plan(prompt, layout=windows, resume_at=5, end=99, branches=(), interval=1000)
    assert plan.positions == (40, 99)


def test_nothing_to_prefill_is_nothing_to_plan() -> None:
    plan = make_plan(prompt_of(9, []), layout=HYBRID, resume_at=8, end=8, branches=[8], interval=INTERVAL)
    assert plan.positions == ()


def test_the_interval_weighs_a_checkpoint_against_entries() -> None:
    assert interval_tokens(checkpoint_nbytes=3_000_000, kv_nbytes_per_token=2_000) == 3000
    assert interval_tokens(checkpoint_nbytes=1, kv_nbytes_per_token=2_000) == 512
    assert interval_tokens(checkpoint_nbytes=10**9, kv_nbytes_per_token=2_000) == 8192
    assert interval_tokens(checkpoint_nbytes=10**6, kv_nbytes_per_token=0) == 8192


def test_what_a_chat_falls_back_on_takes_a_sixteenth_of_its_kv() -> None:
    assert fallback_tokens(checkpoint_nbytes=3_000_000, kv_nbytes_per_token=2_000) == 24_000
    assert fallback_tokens(checkpoint_nbytes=10**6, kv_nbytes_per_token=0) == 0


def test_a_prompts_end_needs_no_checkpoint_where_the_pass_that_samples_can_take_what_is_left() -> None:
    """A turn then takes one pass and one snapshot less."""
    prompt = prompt_of(100, [Boundary(97, BoundaryKind.STABLE)])

    def planned(resume_at: int, end_within: int) -> tuple[int, ...]:
        return make_plan(
            prompt,
            layout=HYBRID,
            resume_at=resume_at,
            end=99,
            branches=(),
            interval=1000,
            end_within=end_within,
        ).positions

    assert planned(5, 0) == planned(5, 2) == (97, 99)
    assert planned(5, 3) == (97,)
    assert planned(97, 2) == (99,) and planned(97, 3) == ()
    assert planned(98, 3) == planned(99, 3) == (), "what was restored serves as well"
