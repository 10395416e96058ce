"""Config, tokenizer and model out of a Hugging Face folder, with errors that name the setting to change.

Owns what is read and refused of such folders, and building one where the settings say so. Does not own how weights are read
(`filling.py`), sharding (`parallel/`), saving (`checkpoint.py`), nor any model's shape: config.json has it.

Invariant: a model that loads is what the folder holds: no weight is left at random, left out, read without its scale, or tied to
another that differs.

    path = prepare(config.model, run_dir / "model")
    model = load_model(path, dtype="float32", device="cpu")
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import torch
import transformers
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import dot_natural_key
from transformers.models.auto.auto_factory import _get_model_class
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from rondo.models.chat_template import turn_ends
from rondo.models.config import ModelConfig
from rondo.models.families import FAMILIES, family_of
from rondo.models.filling import Cut, from_folder
from rondo.models.names import disk_groups, named_as, parts
from rondo.models.value_head import head_parts
from rondo.runtime.errors import ConfigError
from rondo.runtime.reference import load_reference

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_RECIPE = "build.json"


def prepare(config: ModelConfig, folder: Path) -> str:
    """The path to load the model from. With a recipe it is `folder`, written unless it holds the same model already.

    Raises ConfigError when there is no model of a known kind at the path, or `folder` holds another one.
    """
    if config.recipe is None:
        assert config.path is not None
        load_config(config.path)
        return config.path
    build, arguments = config.recipe
    recipe = orjson.dumps({"build": build, "build_args": arguments}, option=orjson.OPT_SORT_KEYS)
    if folder.exists() and any(folder.iterdir()):
        found = (folder / _RECIPE).read_bytes() if (folder / _RECIPE).is_file() else b"something else"
        if found != recipe:
            raise ConfigError(
                f"{folder} must be empty or hold the model of {recipe.decode()}, got {found.decode()}. "
                "Remove it, or choose another run name"
            )
        return str(folder)
    aside = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    transformers.logging.disable_progress_bar()
    load_reference(build, "model.build")(aside, **arguments)
    load_config(str(aside))
    (aside / _RECIPE).write_bytes(recipe)
    if folder.exists():
        folder.rmdir()
    aside.rename(folder)
    return str(folder)


def load_config(path: str) -> Any:
    """The model's config; of an omni model that also speaks, that of its thinker, which is what is trained and served.

    Raises ConfigError when there is none at `path`, none that transformers knows, or one of quantized weights.
    """
    _check_folder(path)
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"model.path must name a model that transformers {transformers.__version__} can load, got {path!r} "
            f"({_first_line(error)}). {'Check the path' if Path(path).is_dir() else f'No folder of that name is in {Path.cwd()}'}"
        ) from error
    trained = getattr(config, "thinker_config", config)
    if found := _quantization(path, (config, trained, trained.get_text_config())):
        raise ConfigError(
            f"model.path must hold weights of full precision, which an optimizer can add to, got {path!r} with {found}. "
            "Choose the release that is not quantized, or write the folder anew with its weights in bfloat16"
        )
    return trained


def load_tokenizer(path: str, *, needs_chat_template: bool = False) -> Any:
    """The tokenizer. Raises ConfigError when there is none, or it has no chat template where one is needed."""
    _check_folder(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise _no_tokenizer(path, _first_line(error)) from error
    # Without its files transformers makes up an empty tokenizer of the family, for which any text is no tokens.
    if not tokenizer("a", add_special_tokens=False).input_ids:
        raise _no_tokenizer(path, "its vocabulary is empty")
    if needs_chat_template and not tokenizer.chat_template:
        raise ConfigError(
            f"the tokenizer of {path!r} must have a chat template for data.apply_chat_template, got none. "
            "Put a chat_template.jinja beside it, or set data.apply_chat_template to False"
        )
    return tokenizer


def num_tokens(tokenizer: Any) -> int:
    """Return one more than the tokenizer's greatest id. A model's vocabulary may be padded beyond it."""
    return 1 + max(tokenizer.get_vocab().values())


def end_ids(path: str, tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens that end a text, in order: all that the model's generation config, its config and the tokenizer name, and
    those with which the chat template ends what the assistant says."""
    config = load_config(path)
    found: set[int] = {tokenizer.convert_tokens_to_ids(end) for end in turn_ends(tokenizer)}
    for each in (generation_config(path), config, config.get_text_config(), tokenizer):
        ids = getattr(each, "eos_token_id", None)
        found.update(ids if isinstance(ids, list | tuple) else () if ids is None else (ids,))
    return tuple(sorted(found))


def generation_config(path: str) -> GenerationConfig | None:
    """How the folder wants its model to generate; None where it does not say."""
    try:
        return GenerationConfig.from_pretrained(path)
    except OSError:
        return None


def load_model(
    path: str, *, dtype: str = "float32", device: str = "cpu", attn: str = "sdpa", cut: Cut = lambda _: None
) -> Any:
    """The model at `path`, of text or of a multimodal family, in evaluation mode, all its weights in `dtype`. `cut` is called
    with it before it has any weights (`filling.py`); collective where it shards. From now on `device` is also what this thread
    takes where code names none.

    Raises ConfigError for weights that are not exactly the model's.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}. Change model.dtype or train.dtype")
    config = load_config(path)
    if device != "cpu":
        torch.cuda.set_device(device)  # else a kernel of a library's runs on the first one
    transformers.logging.disable_progress_bar()
    try:
        model_class, config = _model_class(config)
        how = {"config": config, "dtype": DTYPES[dtype], "attn_implementation": attention(attn)}
        model, report = from_folder(model_class, path, cut, device, **how)
    except ConfigError:
        raise
    except (OSError, ValueError, RuntimeError, ImportError, SafetensorError) as error:
        raise ConfigError(
            f"model.path must hold the weights of a causal LM, got {path!r} ({_first_line(error)}). Check the folder"
        ) from error
    _refuse(path, model, report["missing_keys"], report["unexpected_keys"])
    apart = model.get_expanded_tied_weights_keys(all_submodels=True).items() - model.all_tied_weights_keys.items()
    if apart:
        one, other = min(apart)
        raise ConfigError(
            f"the weights at {path!r} must be equal where config.json ties them, got a {one} that differs from {other}: engines "
            "that read config.json use one of them for both. Set tie_word_embeddings to false there, or remove the one that is "
            "not meant"
        )
    return model


def check_weights(path: str, model: Any) -> None:
    """Compare the weights of a folder with `model`, which has none yet, by the headers of its safetensors files.

    Raises ConfigError that names all tensors that are missing, of another shape, or without a place in the model. Weights that
    are not on this machine yet, or are of another format, are not compared.
    """
    if not (headers := tensors_of(path)):
        return
    sources = {
        name: torch.empty(shape, dtype=torch.float32 if "F" in dtype else torch.int8, device="meta")
        for name, (dtype, shape) in headers.items()
    }
    places, missing, unexpected, loaded, differing = model.state_dict(), set[str](), set[str](), set[str](), list[str]()
    for group in disk_groups(model):  # such as a layer's experts, which are named one by one
        absent = group.shapes.keys() - headers.keys()
        wrong = [name for name in group.shapes.keys() & headers if headers[name][1] != group.shapes[name]]
        if not group.renamed and (wrong or 0 < len(absent) < len(group.shapes)):
            missing |= absent
            differing += [f"{name} {list(headers[name][1])} instead of {list(group.shapes[name])}" for name in wrong]
            loaded |= set(group.sources)
            sources = {name: source for name, source in sources.items() if name not in group.shapes}
    conversions = get_model_conversion_mapping(model)
    for name, part in (
        *parts(model, sources, conversions, places, unexpected),
        *head_parts(model, sources, unexpected),
    ):
        loaded.add(name)
        if part.shape != places[name].shape:
            differing.append(f"{name} {list(part.shape)} instead of {list(places[name].shape)}")
        elif part.is_floating_point() != places[name].is_floating_point():
            differing.append(f"{name} of another kind of numbers than {places[name].dtype}")
    for tied, source in model.all_tied_weights_keys.items():
        if tied in loaded or source in loaded:
            loaded |= {tied, source}
    report = SimpleNamespace(missing_keys=missing | (places.keys() - loaded), unexpected_keys=unexpected)
    model._adjust_missing_and_unexpected_keys(report)
    _refuse(path, model, report.missing_keys, report.unexpected_keys, differing)


def _refuse(
    path: str, model: Any, missing: Collection[str], unexpected: Collection[str], differing: Collection[str] = ()
) -> None:
    """Raise ConfigError if the weights at `path` are not exactly those of `model`."""
    kinds = {"missing": missing, "of another shape": differing, "that it has no place for": unexpected}
    found = [
        f"{len(names)} {kind} ({', '.join(sorted(names, key=dot_natural_key)[:3])}{', ...' if len(names) > 3 else ''})"
        for kind, names in kinds.items()
        if names
    ]
    if not found:
        return
    advice = "Download or export the folder again, or correct config.json"
    head = [name for name, module in model.named_modules() if module is model.get_output_embeddings()]
    if any(name.rpartition(".")[0] in head for name in missing):
        advice += "; tie_word_embeddings must be true there if the model's output layer is its embedding"
    layers, absent = (
        {int(layer) for name in names for layer in re.findall(r"\.layers\.(\d+)\.", name)}
        for names in (model.state_dict().keys() - set(missing), missing)
    )
    if absent - layers:
        advice += f"; num_hidden_layers there counts {len(layers | absent)} layers, of which {len(layers)} have weights"
    raise ConfigError(
        f"the weights at {path!r} must be exactly those of {type(model).__name__} as config.json describes it, got "
        f"{'; '.join(found)}. {advice}"
    )


def tensors_of(path: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return name -> (dtype in safetensors' words, shape) of the tensors that would be loaded, as far as they are on this
    machine; a release may hold them in another layout too. Reads headers alone. Raises ConfigError for a file that is not whole,
    and for one that a local folder's index names and that is not there."""
    local = Path(path) if Path(path).is_dir() else Path(cached_file(path, "config.json")).parent
    whole, index = local / SAFE_WEIGHTS_NAME, local / SAFE_WEIGHTS_INDEX_NAME
    files = [whole]
    if not whole.is_file() and index.is_file():
        try:
            files = [local / name for name in sorted(set(orjson.loads(index.read_bytes())["weight_map"].values()))]
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"{index} must be an index of safetensors files, got {_first_line(error)}. Download it again"
            ) from error
        if Path(path).is_dir() and (absent := [file.name for file in files if not file.is_file()]):
            raise ConfigError(
                f"{local} must hold all files that {index.name} names, got {len(absent)} of {len(files)} missing "
                f"({', '.join(absent[:3])}). Download them"
            )
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for file in filter(Path.is_file, files):
        try:
            with safe_open(file, framework="pt") as opened:
                slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118  # no dictionary
                found |= {name: (each.get_dtype(), tuple(each.get_shape())) for name, each in slices.items()}
        except SafetensorError as error:
            raise ConfigError(f"{file} must be a whole safetensors file, got {error}. Download it again") from error
    return found


def _quantization(path: str, configs: Sequence[Any]) -> str | None:
    """What tells of quantized weights, in the config or in the files: numbers of so few bits mean nothing without a scale."""
    for config in configs:
        settings = getattr(config, "quantization_config", None) or getattr(config, "compression_config", None)
        if settings is not None:
            method = settings.get("quant_method") if isinstance(settings, dict) else settings.quant_method
            return f"a quantization_config ({method})"
    small = ((name, dtype) for name, (dtype, _) in tensors_of(path).items() if dtype.startswith(("F4", "F6", "F8")))
    return next((f"{name} of {dtype}" for name, dtype in small), None)


def attention(attn: str) -> str | None:
    """What transformers is asked for. A kernel takes the place of "sdpa" once it is proved (`attention.py`); for that nothing is
    asked, which is that, and the plain one in families that have no other."""
    return attn if attn == "eager" else None


def empty_model(path: str) -> Any:
    """The model's modules without memory: every tensor on the meta device, in float32; named on disk as in this folder.

    Raises ConfigError for a model that is neither a causal LM nor of a multimodal family.
    """
    config = load_config(path)
    try:
        model = without_memory(config)
    except ValueError as error:
        known = ", ".join(name for family in FAMILIES for name in family.model_types)
        raise ConfigError(
            f"model.path must name a causal LM or a model of a multimodal family ({known}), got {path!r} of model type "
            f"{config.model_type!r} ({_first_line(error)}). Choose another model"
        ) from error
    if names := tensors_of(path):
        named_as(model, names)
    return model


def without_memory(config: Any, dtype: str = "float32") -> Any:
    """The modules of a config on the meta device. ValueError for one that transformers' auto classes do not know."""
    with torch.device("meta"):
        return _auto_class(config).from_config(config, dtype=DTYPES[dtype])


def _auto_class(config: Any) -> Any:
    """transformers' class that loads models of this config."""
    family = family_of(config)
    return AutoModelForCausalLM if family is None else getattr(transformers, family.load)


def _model_class(config: Any) -> tuple[Any, Any]:
    """The class of models of this config, and the config that it takes, as transformers' auto classes choose them. Raises
    ValueError where they know none."""
    auto = _auto_class(config)
    if type(config) not in auto._model_mapping:
        raise ValueError(f"{auto.__name__} knows no {type(config).__name__}")
    found, text = _get_model_class(config, auto._model_mapping), config.sub_configs.get("text_config")
    return found, config.get_text_config() if text is not None and found.config_class == text else config


def _check_folder(path: str) -> None:
    """A local folder is told apart from a name on the hub before anything asks the network."""
    local = Path(path)
    if local.is_dir():
        if not (local / "config.json").is_file():
            found = ", ".join(sorted(path.name for path in local.iterdir())[:5]) or "nothing"
            raise ConfigError(
                f"model.path must be a folder with a config.json, got {path!r} with {found}. Name a Hugging Face folder"
            )
    elif local.is_absolute() or path.startswith(".") or path.count("/") > 1:
        raise ConfigError(f"model.path must be a folder that exists, got {path!r}. Check the path")


def _no_tokenizer(path: str, problem: str) -> ConfigError:
    return ConfigError(
        f"model.path must hold a tokenizer that transformers can load, got {path!r} ({problem}). "
        "Copy the tokenizer's files beside config.json"
    )


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
