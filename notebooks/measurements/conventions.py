"""Read which channels every rotary model type of transformers rotates, off its own code: writes conventions.json.

    python notebooks/measurements/conventions.py        CPU only, nothing is downloaded, 4 minutes on one core

Each type is built with random weights and few layers, its heads as wide as in its default configuration, and run on
three tokens (an image, a sound). What goes into and comes out of its rotary function is kept, and so are the factors of
its q·k products. The function is then called again on unit vectors, which gives what it multiplies a head by:

    y[u] = c[p]·x[a] − s[p]·x[b],  y[v] = c[p]·x[b] + s[p]·x[a]     (a, b) the pair read, (u, v) where it is written

pairing: (a, b) = (p, p + R/2) is "neox", (2p, 2p + 1) "interleaved", counted from `start`. order: (u, v) = (a, b) is
"kept"; neighbours written to p and p + R/2 are "halves". sign: that of s at position 1; null where positions are places
in an image. D, start: from where y lies in the q of the product. qk_norm: q and k of all tokens have one norm. layers:
which products of the same kind have a q that isn't rotated. Where layers differ, a key says behind a colon which
row is whose: the layers' type, or the stack that holds them. class: the text backbone, or what was read in its place.
not_default: what was set because the default configuration doesn't run, or doesn't rotate, without it.
Each call is executed, with a table that `rope_table` makes from the angles of position 1, on random x at all positions.
Where it differs from the type's function by more than 1e-5, no row is written: "not_read" has the reason.
"""

import contextlib
import datetime
import functools
import importlib
import inspect
import json
import pathlib
import re
import sys
import warnings

import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES, model_type_to_module_name

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
import rope_kernels as rk  # noqa: E402

TOKENS = 3  # positions 0, 1, 2: no pair turns by more than 2 rad, so every sine is positive
PRODUCTS = ("matmul", "__matmul__", "bmm", "baddbmm", "einsum", "scaled_dot_product_attention")
ROTATES = re.compile(r"apply_\w*(rotary|rope)|rotate_queries_or_keys")

# ------------------------------------------------------------------------------------------------ building a type

SMALL = dict(vocab_size=64, intermediate_size=32, ffn_hidden_size=32, moe_intermediate_size=32, num_experts=4)
SMALL |= dict(n_routed_experts=4, num_local_experts=4, n_group=1, topk_group=1, shared_expert_intermediate_size=32)
SMALL |= dict(moe_shared_expert_intermediate_size=32, vocab_size_per_layer_input=64, hidden_size_per_layer_input=16)
SMALL |= dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, encoder_layers=2, decoder_layers=2, initializer_range=0.3)
DEFAULT = dict(rope_type="default", rope_theta=10000.0)
EXTRA = {  # what a type's default configuration lacks to run, or to rotate at all
    "BambaConfig": dict(attn_layer_indices=[1]),
    "ChameleonConfig": dict(vocabulary_map={"<image>": 3}),
    "CohereCompassTextConfig": dict(rope_parameters=dict(full_attention=DEFAULT, sliding_attention=DEFAULT)),
    "DiffusionGemmaTextConfig": dict(top_k_experts=2),
    "DbrxConfig": dict(attn_config=dict(rope_theta=10000.0, kv_n_heads=1, clip_qkv=8)),
    "DeepseekOcr2TextConfig": dict(mlp_layer_types=["dense"] * 8),
    "Dots1Config": dict(n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2),
    "EsmConfig": dict(vocab_size=64, position_embedding_type="rotary"),
    "Gemma3nTextConfig": dict(num_kv_shared_layers=0),
    "Glm4MoeConfig": dict(head_dim=128),
    "Glm4vMoeTextConfig": dict(head_dim=128),
    "Glm4vTextConfig": dict(rope_parameters=DEFAULT | dict(partial_rotary_factor=0.5)),
    "GlmImageTextConfig": dict(rope_parameters=DEFAULT | dict(partial_rotary_factor=0.5)),
    "GraniteMoeHybridConfig": dict(
        num_hidden_layers=4, layer_types=["full_attention"] * 4, position_embedding_type="rope"
    ),
    "HunYuanVLTextConfig": dict(rope_parameters=DEFAULT | dict(mrope_section=[16, 16, 16, 16])),
    "KyutaiSpeechToTextConfig": dict(pad_token_id=None, audio_pad_token_id=0, codebook_vocab_size=64),
    "Lfm2MoeConfig": dict(num_hidden_layers=4, layer_types=["full_attention"] * 4),
    "MoonshineStreamingConfig": dict(num_key_value_heads=2),
    "Qwen4ExpTextConfig": dict(
        indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=256, indexer_budget=8, indexer_compress_ratio=2
    ),
    "Qwen3OmniMoeTextConfig": dict(head_dim=128),
    "Step3p7TextConfig": dict(sliding_window=8),
    "Step3p5Config": dict(sliding_window=8),
    "T5GemmaModuleConfig": dict(dropout_rate=0.0),
    "T5Gemma2DecoderConfig": dict(dropout_rate=0.0),
    "Wav2Vec2BertConfig": dict(position_embeddings_type="rotary"),
    "Wav2Vec2ConformerConfig": dict(position_embeddings_type="rotary"),
    "Zamba2Config": dict(use_mem_rope=True),
    "ZayaConfig": dict(num_experts_per_tok=1),
}


def get(config, name):
    """Return an attribute, the one said for the whole model where it differs by layer, or None."""
    try:
        return getattr(config, name, None)
    except Exception:  # one for each layer
        return vars(config).get(name)


def has(config, name):
    return get(config, name) is not None or name in vars(config)


def small(kind, wide):
    """Return a configuration of few layers; heads are as wide as by default, and with `wide` as many."""
    default, keys = kind(), dict(SMALL)
    heads, width, kv = (get(default, key) for key in ("num_attention_heads", "hidden_size", "num_key_value_heads"))
    if isinstance(heads, int) and isinstance(width, int):
        computed = isinstance(inspect.getattr_static(kind, "head_dim", None), property)
        head_dim = get(default, "head_dim") or width // heads
        if has(default, "head_dim") and not computed:
            keys["head_dim"] = head_dim
        if not wide:
            heads = keys["num_attention_heads"] = 2
            keys["hidden_size"] = 2 * head_dim  # some types ignore head_dim, and divide
        keys["num_key_value_heads"] = 1 if not wide and kv not in (None, get(default, "num_attention_heads")) else heads
    layers = get(default, "num_hidden_layers")
    if isinstance(layers, int):
        lists = {k.lstrip("_"): list(v) for k, v in vars(default).items() if isinstance(v, list) and len(v) == layers}
        firsts = [values.index(value) for values in lists.values() for value in values]
        keys["num_hidden_layers"] = min(layers, max([7, *firsts]) + 1, 16)
        keys |= {key: values[: keys["num_hidden_layers"]] for key, values in lists.items()}
    keys["num_experts_per_tok"] = min(get(default, "num_experts_per_tok") or 1, 2)
    for key, value in list(keys.items()):
        old = get(default, key)
        if not has(default, key) or isinstance(old, list) != isinstance(value, list):
            del keys[key]
    for key in getattr(kind, "sub_configs", None) or {}:
        if get(default, key) is not None:
            keys[key] = small(type(getattr(default, key)), wide)
    keys = {kind.attribute_map.get(key, key): value for key, value in keys.items()}
    return kind(**keys | EXTRA.get(kind.__name__, {}))


def candidates(folder, model_type):
    """Yield (model class, configuration class): the text backbone first, then whatever the folder's file defines."""
    config = CONFIG_MAPPING[model_type]()
    text = config.get_text_config(decoder=True)
    for kind, home in ((type(text), model_type_to_module_name(text.model_type)), (None, folder)):
        module = importlib.import_module(f"transformers.models.{home}.modeling_{home}")
        classes = [c for c in vars(module).values() if inspect.isclass(c) and issubclass(c, PreTrainedModel)]
        classes = [c for c in classes if c.__module__ == module.__name__ and c.config_class is not None]
        classes = [
            c for c in classes if c.forward is not PreTrainedModel.forward and "PreTrained" not in c.__name__[-16:]
        ]
        exact = [c for c in classes if c.config_class is kind]
        for c in sorted(exact or classes, key=lambda c: ("For" in c.__name__, "Decoder" not in c.__name__)):
            yield c, kind or c.config_class


def inputs(model):
    """Return three tokens, or an image, a film or a sound of the size that the configuration asks for."""
    parameters, config = inspect.signature(model.forward).parameters, model.config
    first = model.main_input_name
    needed = {n for n, p in parameters.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD}
    needed |= {first} & set(parameters)

    def number(*names, otherwise):
        found = next((get(config, name) for name in names if get(config, name)), otherwise)
        return found if isinstance(found, int) else found[0]

    patch, merge = number("patch_size", otherwise=14), number("spatial_merge_size", "merge_kernel_size", otherwise=2)
    inner = get(config, "vision_config") or get(config, "semantic_model_config") or config
    colours = number("in_channels", "num_channels", "in_chans", otherwise=3)
    size = min(number("image_size", otherwise=4 * patch), 32 * patch)
    given = {n: torch.arange(3, 3 + TOKENS)[None] for n in ("input_ids", "decoder_input_ids") if n in parameters}
    given |= {"use_cache": False} if "use_cache" in parameters else {}
    grid = {n: torch.tensor([[1, 2 * merge, 2 * merge]]) for n in ("grid_thw", "image_grid_thw") if n in needed}
    if grid:
        patches = torch.randn(4 * merge**2, colours * number("temporal_patch_size", otherwise=1) * patch**2)
        given |= grid | {n: patches for n in ("hidden_states", "pixel_values") if n in needed}
    if "merge_sizes" in needed:
        given["merge_sizes"] = torch.tensor([merge])
    if type(config).__name__ == "KyutaiSpeechToTextConfig":  # a column for the text, and one for each codebook
        given["input_ids"] = given["input_ids"][..., None].expand(-1, -1, config.num_codebooks + 1)
    if "image_encoder_embeddings" in parameters:  # Idefics: the image's, ready made
        needed |= {"image_encoder_embeddings"}
        given["image_attention_mask"] = torch.ones(1, TOKENS, 1)
    if "past_values" in needed:
        given["past_values"] = torch.randn(1, TOKENS * number("patch_length", otherwise=32))
    shapes = {
        "pixel_values": (1, colours, size, size),
        "pixel_values_videos": (1, number("frames_per_clip", otherwise=4), colours, size, size),
        "input_features": (1, 40, get(inner, "feature_projection_input_dim") or number("num_mel_bins", otherwise=80)),
        "input_values": (1, 1, 16000) if has(config, "audio_channels") else (1, 16000),
        "image_encoder_embeddings": (1, 1, 4, get(inner, "embed_dim")),
        "inputs_embeds": (1, TOKENS, number("hidden_size", otherwise=64)),
    }
    return {n: torch.randn(shape) for n, shape in shapes.items() if n in needed} | given


# --------------------------------------------------------------------------------------------------- watching it run


class Watch(torch.overrides.TorchFunctionMode):
    """Keep the calls of a module's rotary functions, and the q and k of the products that make scores, in order."""

    def __init__(self, model):
        super().__init__()
        self.model, self.events, self.inside, self.stack = model, [], 0, []
        self.names = {id(part): name for name, part in model.named_modules()}

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result, name = function(*args, **(kwargs or {})), getattr(function, "__name__", "")
        if self.inside or name not in PRODUCTS:
            return result
        tensors = [t for t in (*args, *(kwargs or {}).values()) if isinstance(t, torch.Tensor)]
        if name == "baddbmm":
            tensors = tensors[1:]
        q, k = tensors[:2] if len(tensors) > 1 else args[1][:2]
        if PRODUCTS.index(name) < 4 and k.dim() > 1:
            k = k.mT
        square = name == "scaled_dot_product_attention" or (result.dim() > 2 and result.shape[-1] == result.shape[-2])
        if square and q.dim() > 2 and k.dim() > 2 and q.shape[-1] == k.shape[-1] and q.shape[-2] > 1:
            self.events.append(("product", self.place(), q, k))
        return result

    def place(self):
        """The layer of the innermost module that is running, (first number in its path, stack), and its class."""
        part = self.stack[-1]
        stack, *rest = self.names.get(id(part), "").split(".")
        return (next((int(name) for name in rest if name.isdigit()), 0), stack), type(part).__name__

    def kept(self, function):
        @functools.wraps(function)
        def call(*args, **kwargs):
            self.inside += 1
            try:
                result = function(*args, **kwargs)
            finally:
                self.inside -= 1
            if not self.inside:
                bound = inspect.signature(function).bind(*args, **kwargs)
                bound.apply_defaults()
                free = [n for n, value in bound.arguments.items() if isinstance(value, torch.Tensor)]
                for index, y in enumerate(result if isinstance(result, (tuple, list)) else (result,)):
                    name = next((n for n in free if y is not None and bound.arguments[n].shape == y.shape), None)
                    if name is not None:
                        free.remove(name)
                        self.events.append(("rotation", self.place(), (function, bound, name, index), y))
            return result

        return call

    @contextlib.contextmanager
    def watching(self):
        module = sys.modules[type(self.model).__module__]
        homes = [module, *(c for c in vars(module).values() if inspect.isclass(c) and c.__module__ == module.__name__)]
        found = [(home, name, f) for home in homes for name, f in vars(home).items() if ROTATES.search(name)]
        hooks = torch.nn.modules.module
        before = hooks.register_module_forward_pre_hook(lambda part, given: self.stack.append(part))
        after = hooks.register_module_forward_hook(lambda part, given, y: self.stack.pop() and None, always_call=True)
        try:
            for home, name, f in found:
                static = isinstance(f, staticmethod)
                setattr(home, name, staticmethod(self.kept(f.__func__)) if static else self.kept(f))
            with torch.no_grad(), self:
                yield
        finally:
            before.remove()
            after.remove()
            for home, name, f in found:
                setattr(home, name, f)


# ------------------------------------------------------------------------------------------------------- reading it


def again(call, x):
    """Call a kept rotary function on another x."""
    function, bound, name, index = call
    given = inspect.BoundArguments(bound.signature, bound.arguments | {name: x})
    y = function(*given.args, **given.kwargs)
    return y[index] if isinstance(y, (tuple, list)) else y


def rotation(call):
    """Read a rotary function on unit vectors; return what it does to the channels it is given, and its angles."""
    x = call[1].arguments[call[2]]
    width = x.shape[-1]
    units = torch.eye(width, dtype=x.dtype)
    matrix = torch.stack([again(call, unit.expand(x.shape).contiguous()) for unit in units], -1).double()
    last = matrix.flatten(0, -3)[-1]  # the last token
    moved = [j for j in range(width) if not torch.equal(last[:, j], units[j].double())]
    if not moved:
        raise ValueError("no channel moves")
    written = {j: tuple(last[:, j].nonzero().flatten().tolist()) for j in moved}
    pairs = [(a, b) for a in moved for b in moved if a < b and written[a] == written[b]]
    if len(pairs) * 2 != len(moved) or any(len(rows) != 2 for rows in written.values()):
        raise ValueError("its channels are not turned in pairs")
    a, b = torch.tensor(pairs).T
    u, v = torch.tensor([written[first] for first in a.tolist()]).T
    if not torch.equal(matrix[..., u, a], matrix[..., v, b]):
        raise ValueError("it multiplies the two channels of a pair by cosines of different angles: no rotation")
    a, b = pairs[0]
    half = b - a
    if all(pair == (a + 2 * p, a + 2 * p + 1) for p, pair in enumerate(pairs)) and len(pairs) > 1:
        found = {"pairing": "interleaved", "R": len(moved), "start": a}
    elif all(second - first == half for first, second in pairs) and pairs[-1][0] < a + half:
        found = {"pairing": "neox", "R": 2 * half, "start": a}  # of which some may have the frequency 0
    else:
        raise ValueError(f"its pairs {pairs[:3]} … are neither half-split nor interleaved over one stretch")
    p, start, R = torch.arange(found["R"] // 2), found["start"], found["R"]
    halves, neighbours = (start + p, start + p + R // 2), (start + 2 * p, start + 2 * p + 1)
    read = neighbours if found["pairing"] == "interleaved" else halves
    kept = written[a] == (a, b)
    if not kept and (found["pairing"] != "interleaved" or written[a] != (start, start + R // 2)):
        raise ValueError(f"it writes the pair {(a, b)} to {written[a]}")
    found["order"] = "kept" if kept else "halves"
    write = read if kept else halves
    cos, sin = matrix[..., write[0], read[0]], matrix[..., write[1], read[0]]
    return found | {"turning": len(pairs), "width": width}, cos, sin


def reordering(found):
    """Return the index that puts evens before odds in the rotated channels, if the type does so."""
    start, R, width = found["start"], found["R"], found["width"]
    tail = torch.arange(start, start + R)
    return torch.cat((torch.arange(start), tail[0::2], tail[1::2], torch.arange(start + R, width)))


def executed(call, found, cos, sin):
    """Run our own rotation beside the type's function; return the sign, or raise if they differ by more than 1e-5."""
    x = call[1].arguments[call[2]]
    x = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x.dtype)
    rows = [axis for axis in range(cos.dim() - 1) if (cos != cos.narrow(axis, 0, 1)).any()]
    n = cos.shape[rows[0]] if len(rows) == 1 else 0
    sign = None
    if n > 2:
        one = [c.movedim(rows[0], 0).reshape(n, -1, c.shape[-1])[1, 0] for c in (cos, sin)]
        angle, factor = torch.atan2(one[1], one[0]), torch.hypot(one[0], one[1]).mean().item()
        shape = [n if axis in rows else 1 for axis in range(cos.dim() - 1)] + [-1]
        table = [t.view(shape) for t in rk.rope_table(angle, torch.arange(n), factor, dtype=torch.float64)]
        if all((ours - read).abs().max() < 1e-5 * n for ours, read in zip(table, (cos, sin), strict=True)):
            cos, sin = table  # positions 0, 1, 2 … along one axis
            signs = set(angle[angle != 0].sign().tolist())
            if len(signs) != 1:
                raise ValueError("its pairs turn in different directions")
            sign = int(signs.pop())
    # otherwise places in an image or a film: the table as it was read
    ours = rk.torch_partial_rope(x.float(), cos.float(), sin.float(), found["pairing"], found["start"])
    ours = ours[..., reordering(found)] if found["order"] == "halves" else ours
    error = (again(call, x).float() - ours).abs().max().item()
    if not error <= 1e-5 * max(1.0, cos.abs().max().item()):
        raise ValueError(f"our rotation differs from its function by {error:.1e}")
    return sign


def lies_at(row, y):
    """Return the channel from which on y lies in a row, up to a positive factor; None if it doesn't."""
    if len(row) < len(y):
        return None
    alike = torch.cosine_similarity(row.double().unfold(0, len(y), 1), y.double()[None], dim=-1)
    return alike.argmax().item() if alike.max() > 1 - 1e-6 else None


def one_norm(x):
    """Is the norm of every token the same, as behind a norm over the head or over all heads?"""
    square = x.double().square().movedim(-2, 0).flatten(1).mean(1)
    return bool(square.std() < 1e-3 * square.mean())


def rows(watch):
    """Return what each layer rotates: {layer: row}, and the layers whose products have a q that isn't rotated."""
    found, unrotated, places = {}, set(), set()
    for number, (what, place, *tensors) in enumerate(watch.events):
        if what != "product":
            continue
        sides, norms = [], []
        for x in tensors:
            last = x.flatten(0, -2)[-1]
            before = [e for e in watch.events[:number] if e[0] == "rotation" and e[1][0] == place[0]]
            spots = ((e[2], lies_at(last, e[3].flatten(0, -2)[-1])) for e in reversed(before))
            sides.append(next(((call, spot) for call, spot in spots if spot is not None), None))
            norms.append(one_norm(x))
        if None in sides:
            unrotated |= {place} if sides == [None, None] else set()
            continue
        places.add(place[1])
        (of_q, call, spot), (of_k, k_call, k_spot) = ((rotation(call), call, spot) for call, spot in sides)
        sign = executed(call, *of_q)
        if of_k[0] != of_q[0] or k_spot != spot or executed(k_call, *of_k) != sign:
            raise ValueError(f"q and k are rotated differently: {of_q[0]} and {of_k[0]}")
        kind = of_q[0]
        row = {"pairing": kind["pairing"], "order": kind["order"], "D": tensors[0].shape[-1], "R": kind["R"]}
        row |= {"start": spot + kind["start"], "sign": sign, "qk_norm": all(norms)}
        if kind["turning"] * 2 < kind["R"]:
            row["turning_pairs"] = kind["turning"]
        found.setdefault(place[0], []).append(row)
    return found, sorted({number for (number, stack), part in unrotated if part in places})


def line(row):
    """The call of this project that does the same to a head of D channels."""
    whole = "" if row["R"] == row["D"] else f", start={row['start']}"
    if row["order"] == "kept":
        whole += ", inverse=True" if row["sign"] == -1 else ""
        return f'apply_rope(q, k, cos, sin, positions, mode="{row["pairing"]}"{whole})'
    start, D = row["start"], row["D"]  # such a stretch is the tail of its head
    evens = f"[*range({start}), *range({start}, {D}, 2), *range({start + 1}, {D}, 2)]"
    return f'torch_partial_rope(x, cos, sin, "{row["pairing"]}", start={start})[..., {evens}]'


def layers_without(config, unrotated, n):
    if not unrotated:
        return "all"
    lists = {key.lstrip("_"): v for key, v in vars(config).items() if isinstance(v, list) and len(v) >= n}
    for key, values in sorted(lists.items(), key=lambda item: ("rope" not in item[0], len(set(map(str, item[1]))))):
        without = {str(values[layer]) for layer in unrotated}
        if without.isdisjoint(str(values[layer]) for layer in range(n) if layer not in unrotated):
            return f"some layers have no rope, by {key}: {' or '.join(sorted(without))}"
    return f"some layers have no rope: {unrotated} of the first {n}"


def said(error):
    lines = (str(error).strip() or repr(error)).splitlines()
    return lines["validation error" in lines[0] and -1].strip()[:150]


def read(folder, model_type, seed=0):
    """Return the rows of a model type, {key: row}; ValueError with the reason where that is impossible."""
    reasons = []
    for model_class, kind in candidates(folder, model_type):
        for wide in (False, True):
            name = model_class.__name__
            try:
                config = small(kind, wide)
                with torch.device("meta"):
                    size = sum(p.numel() for p in model_class(config).parameters())
                if size > (3e8 if wide else 1.2e9):
                    raise ValueError(f"{size:.1g} weights with so few layers")
                torch.manual_seed(seed)
                config._attn_implementation = "eager"
                watch = Watch(model_class(config).eval())
                for n, p in watch.model.named_parameters():
                    if n.rpartition(".")[2] not in ("weight", "bias") and not p.any():
                        torch.nn.init.normal_(p)  # a temperature that starts at 0 would make every score 0
                given = inputs(watch.model)
            except Exception as error:
                reasons.append(f"{name} can't be built small: {said(error)}")
                continue
            stopped = None
            try:
                with watch.watching():
                    watch.model(**given)
            except Exception as error:
                stopped = error
                reasons.append(f"{name} doesn't run on generic input: {said(error)}")
            try:
                found, unrotated = rows(watch)
            except ValueError as error:
                reasons.append(f"{name}: {error}")
                continue
            if not found:
                if stopped is None:
                    reasons.append(f"{name} runs, but no q of its q·k products is what a rotary function returned")
                continue
            n = get(config, "num_hidden_layers") or 1
            layers = layers_without(config, unrotated, n)
            kinds = {}  # the first layer of each kind decides about qk_norm: further up random tokens grow alike
            for layer, several in sorted(found.items()):
                for row in several:
                    kinds.setdefault(json.dumps(row | {"qk_norm": None}), (layer, row))
            result = {}
            types = get(config, "layer_types")
            for (number, stack), row in kinds.values():
                key = model_type
                if len(kinds) > 1:
                    key += ":" + (types[number] if types else stack)
                if key in result:
                    raise ValueError(f"layers of one type differ: {kinds}")
                result[key] = row | {"layers": layers, "call": line(row), "class": name}
                if kind.__name__ in EXTRA:
                    result[key]["not_default"] = EXTRA[kind.__name__]
            return result
    raise ValueError(reasons[0] if reasons else "its file defines no model")


def types():
    """Return {model type: folder} of every modeling file that defines a rotary embedding or a rotary function."""
    pattern = re.compile(r"^class \w*(Rotary|Rope|RoPE)|^ *def \w*(rotary|rope\b|rotate_)", re.M)
    files = (pathlib.Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")
    folders = sorted(path.parent.name for path in files if pattern.search(path.read_text(encoding="utf-8")))
    found = {}
    for folder in folders:
        names = [t for t in CONFIG_MAPPING_NAMES if model_type_to_module_name(t) == folder]
        found[next((t for t in names if t.replace("-", "_") == folder), names[0])] = folder
    return found


def main():
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)  # configurations this small draw warnings
    torch.set_num_threads(1)
    models, not_read = {}, {}
    for model_type, folder in types().items():
        try:
            models |= read(folder, model_type)
        except Exception as error:
            not_read[model_type] = str(error)
        print(model_type, not_read.get(model_type, "read"), flush=True)
    versions = {"transformers": transformers.__version__, "torch": torch.__version__.partition("+")[0]}
    written = {"provenance": versions | {"date": datetime.date.today().isoformat()}}
    written |= {"models": models, "not_read": not_read}
    text = json.dumps(written, ensure_ascii=False, indent=1)
    text = re.sub(r"\n {3,}| *\n  (?=})", " ", text)  # a line for each type
    (ROOT / "notebooks" / "conventions.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
