"""Tokens of images in a prompt: from one for each, which the chat template writes, to all of them."""

from collections.abc import Sequence

from server.errors import InvalidValue, PromptTooLong, TemplateError, UnsupportedField
from server.http.chat.requests import ImageBounds
from server.http.services import ServedModel
from server.model.images.process import ProcessedImage
from server.model.images.settings import ImageSettings, ImageTokens
from server.protocol.images import PromptImage
from server.protocol.messages import EngineReady
from server.text.image_places import replaced_in_template
from server.text.tokenizer import Tokenizer


def check_images(model: ServedModel, ready: EngineReady, places: Sequence[str], kind: str) -> None:
    """Raise UnsupportedField for images that this model cannot see, InvalidValue for more than a prompt may have.

    places  the fields of all images of a prompt
    kind    what the client calls them
    """
    if not places:
        return
    if model.images is None:
        raise _not_seen(places[0], kind, model.no_images or "it sees no images")
    if not ready.max_image_tokens:
        raise _not_seen(places[0], kind, "the engine has no tower for them")
    if len(places) > model.images.limit:
        limit = f"the limit is {model.images.limit} (--limit-images)"
        raise InvalidValue(f"The prompt has {len(places)} images, {limit}.", param=places[model.images.limit])


def _not_seen(place: str, kind: str, why: str) -> UnsupportedField:
    message = f"{place}: the type {kind!r} is not implemented for this model: {why}."
    return UnsupportedField(message, param=f"{place}.type")


def check_bounds(model: ServedModel, bounds: ImageBounds | None) -> None:
    """Raise UnsupportedField for sizes of images that the model does not see."""
    if model.images is None and bounds is not None and bounds.model_fields_set:
        raise UnsupportedField("mm_processor_kwargs: this model sees no images.", param="mm_processor_kwargs")


def text_with_borders(text: str, tokens: ImageTokens, tokenizer: Tokenizer) -> str:
    """Return a rendered text in which each token that the template writes for an image is one with its borders."""
    borders = tokens.start, tokens.end
    if tokens.start_id is None and not any((*borders, tokens.before, tokens.after)):
        return text
    for name in borders:
        if name and name not in tokenizer.added_ids:
            raise TemplateError(f"The tokenizer has no token {name}.", param="messages")
    names = {token_id: name for name, token_id in tokenizer.added_ids.items()}
    written = names.get(tokens.template_id)
    ids = [it for it in (tokens.start_id, tokens.image_id, tokens.end_id) if it is not None]
    if written is None or any(it not in names for it in ids):
        raise TemplateError("The tokenizer has no tokens for images.", param="messages")
    image = "".join((tokens.start, *(names[it] for it in ids), tokens.end))
    return replaced_in_template(text, written, tokens.before + image + tokens.after)


def with_image_tokens(
    token_ids: Sequence[int],
    images: Sequence[ProcessedImage],
    settings: ImageSettings,
    tokenizer: Tokenizer,
    ready: EngineReady,
) -> tuple[list[int], tuple[PromptImage, ...]]:
    """Put all of an image's tokens where there is one, and say where they are. Raises RequestError.

    token_ids  have one placeholder for each image, in order
    """
    tokens = settings.tokens
    between = tokenizer.added_ids.get(tokens.between)
    if tokens.between and between is None:
        raise TemplateError(f"The tokenizer has no token {tokens.between}.", param="messages")
    num_placeholders = token_ids.count(tokens.image_id)
    if num_placeholders != len(images):
        message = f"The chat template wrote {num_placeholders} image tokens for {len(images)} images."
        raise TemplateError(message, param="messages")
    num_tokens = sum(image.num_tokens for image in images)
    if num_tokens > ready.max_image_tokens:
        limit = f"this server computes at most {ready.max_image_tokens} in one prompt"
        raise PromptTooLong(
            f"The images have {num_tokens} tokens, {limit}; send fewer or smaller ones.", param="messages"
        )
    found: list[int] = []
    placed = []
    rest = iter(images)
    for token_id in token_ids:
        if token_id != tokens.image_id:
            found.append(token_id)
            continue
        image = next(rest)
        placed.append(PromptImage(len(found), image.num_tokens, image.grid, image.pixels, image.digest))
        found += [token_id] * image.num_tokens if between is None else _in_lines(image, settings, between)
    return found, tuple(placed)


def _in_lines(image: ProcessedImage, settings: ImageSettings, between: int) -> list[int]:
    """Return an image's tokens, with one between each row and the next."""
    height, width = (side // settings.merge_size for side in image.grid[1:])
    return ([*[settings.tokens.image_id] * width, between] * height)[:-1]
