import pytest

from tests.chat.text_models import template_names, text_model


def test_any_text_survives_the_tokenizer() -> None:
    model = text_model()
    text = "<|im_start|>user\n  Grüße, 世界! \U0001f600\n\n<think>\t</think><|im_end|>"
    assert model.decode(model.encode(text)) == text


@pytest.mark.parametrize("name", template_names())
def test_every_template_renders_one_question(name: str) -> None:
    model = text_model(name)
    assert model.render is not None
    text = model.render([{"role": "user", "content": "Hello?", "name": "ada"}], add_generation_prompt=True)
    assert "Hello?" in text


def test_a_model_without_template() -> None:
    assert text_model(None).render is None


def test_the_detokenizer_gives_whole_characters() -> None:
    model = text_model()
    detokenizer = model.detokenizer()
    segments: list[str] = []
    for token in model.encode("naïve \U0001f600 end"):
        detokenizer.add_token(token)
        segments.append(detokenizer.last_segment)
    detokenizer.finalize()
    segments.append(detokenizer.last_segment)
    assert "".join(segments) == "naïve \U0001f600 end"
    assert not any("\ufffd" in segment for segment in segments)
