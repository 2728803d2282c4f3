"""Computes the cost of rounded tensors with PyTorch in FP64; `tests/cli/bisect.rs` compares it with
`finetune bisect --json`.

    python rounding_cost.py CASES

CASES is a JSON list of cases: a folder, a text, a type and a loss scale. Each case computes the gradient of the mean
loss of the text's bytes, times the scale, with the model in the folder: exactly, with the tensors of each site rounded
to the type, and with all others rounded. Prints a JSON list with an object for each case, which has `all` and `sites`.
"""

import json
import sys

import torch
from transformers import AttentionInterface, AutoModelForCausalLM

# The type to round to, the sites that are rounded, and all sites of the model.
dtype = None
chosen = set()
seen = set()


def rounded(x, site):
    seen.add(site)
    return x.to(dtype).to(torch.float64) if site in chosen else x


def forward(x, layer, kind):
    x.data.copy_(rounded(x.data, (layer, kind)))


def backward(x, layer, kind):
    x.register_hook(lambda gradient: rounded(gradient, (layer, kind)))


class Attention(torch.autograd.Function):
    """Attention whose backward pass reads the rounded output, as one does that recomputes the probabilities."""

    @staticmethod
    def forward(ctx, q, k, v, mask, scaling, layer):
        p = (q @ k.transpose(-1, -2) * scaling).masked_fill(~mask, -torch.inf).softmax(-1)
        out = rounded(p @ v, (layer, "softmax"))
        ctx.save_for_backward(q, k, v, p, out)
        ctx.scaling = scaling
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, p, out = ctx.saved_tensors
        ds = p * (dout @ v.transpose(-1, -2) - (dout * out).sum(-1, keepdim=True)) * ctx.scaling
        return ds @ k, ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ dout, None, None, None


def attention(module, q, k, v, mask, scaling=None, **_):
    scaling = q.shape[-1] ** -0.5 if scaling is None else scaling
    groups, place = q.shape[1] // k.shape[1], torch.arange(q.shape[2])
    distance = place[:, None] - place
    mask = (distance >= 0) & (distance < (getattr(module, "sliding_window", None) or len(place)))
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    return Attention.apply(q, k, v, mask, scaling, f"h.{module.layer_idx}").transpose(1, 2).contiguous(), None


AttentionInterface.register("rounded", attention)


def of_case(folder, text, type_name, scale):
    global dtype
    dtype = getattr(torch, type_name)
    seen.clear()
    chosen.clear()
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="rounded", dtype=torch.float32)
    model = model.double().eval()
    backbone = model.base_model
    is_gpt2 = hasattr(backbone, "h")
    blocks = backbone.h if is_gpt2 else backbone.layers
    # transformers normalizes in FP32.
    one = 1 if type(model).__name__.startswith("Gemma") else 0
    for norm in [module for module in model.modules() if type(module).__name__.endswith("RMSNorm")]:
        eps = getattr(norm, "eps", None) or norm.variance_epsilon
        norm.forward = lambda x, w=norm.weight, e=eps: x * (x.pow(2).mean(-1, keepdim=True) + e).rsqrt() * (one + w)
    # A leaf for each use of a tied matrix, because each use rounds its gradient.
    tied = model.config.tie_word_embeddings
    if tied:
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())

    def after(module, layer, kind, gradient=None):
        """Rounds a module's output, and its gradient if `gradient` is its kind."""

        def hook(_, __, out):
            out = out[0] if isinstance(out, tuple) else out
            forward(out, layer, kind)
            if gradient:
                backward(out, layer, gradient)

        module.register_forward_hook(hook)

    def before(module, layer, kind, gradient):
        """Rounds a module's input, unless `kind` is `None`, and its gradient."""

        def hook(_, inputs):
            if kind:
                forward(inputs[0], layer, kind)
            backward(inputs[0], layer, gradient)

        module.register_forward_pre_hook(hook)

    for i, block in enumerate(blocks):
        layer, gradient, residual = f"h.{i}", "gradient", "residual"
        if is_gpt2:
            norms, middle = [block.ln_1, block.ln_2], block.ln_2
            products = [block.attn.c_attn, block.attn.c_proj, block.mlp.c_fc, block.mlp.c_proj]
            out, down = block.attn.c_proj, block.mlp.c_proj
        else:
            attn, mlp = block.self_attn, block.mlp
            middle = getattr(block, "pre_feedforward_layernorm", block.post_attention_layernorm)
            norms = [block.input_layernorm, middle]
            products = [attn.q_proj, attn.k_proj, attn.v_proj, attn.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj]
            out, down = attn.o_proj, mlp.down_proj
            if middle is not block.post_attention_layernorm:
                for norm in [block.post_attention_layernorm, block.post_feedforward_layernorm, attn.q_norm, attn.k_norm]:
                    after(norm, layer, "norm")
        for norm in norms:
            after(norm, layer, "norm", gradient)
        for product in products:
            after(product, layer, "product", gradient)
        before(out, layer, None, gradient)
        before(down, layer, "activation", gradient)
        before(middle, layer, residual, residual)
        before(block, layer, None, residual)
        after(block, layer, residual)
    final = backbone.ln_f if is_gpt2 else backbone.norm
    blocks[0].register_forward_pre_hook(lambda _, inputs: forward(inputs[0], "head", "residual"))
    before(final, "head", None, "residual")
    after(final, "head", "norm", "gradient")
    after(model.lm_head, "head", "product", "gradient")

    parameters = dict(model.named_parameters())
    original = {name: parameter.detach().clone() for name, parameter in parameters.items()}

    def layer_of(name):
        parts = name.split(".")
        return f"h.{parts[2]}" if parts[1] in ("h", "layers") else "head"

    def gradients(sites):
        chosen.clear()
        chosen.update(sites)
        for name, parameter in parameters.items():
            parameter.grad = None
            parameter.data = rounded(original[name].clone(), (layer_of(name), "weights"))
        ids = torch.tensor([list(text.encode())])
        logits = model(ids[:, :-1], use_cache=False).logits
        (scale * torch.nn.functional.cross_entropy(logits[0], ids[0, 1:])).backward()
        found = {name: rounded(p.grad, (layer_of(name), "weight_gradient")) for name, p in parameters.items()}
        if tied:
            embedding = next(name for name, p in parameters.items() if p is model.get_input_embeddings().weight)
            total = parameters[embedding].grad + found.pop("lm_head.weight")
            found[embedding] = rounded(total, ("head", "weight_gradient"))
        return torch.cat([found[name].flatten() for name in sorted(found)])

    exact = gradients([])
    sites = sorted(seen)

    def error(rounded_sites):
        found = gradients(rounded_sites)
        cos = torch.dot(found / found.norm(), exact / exact.norm())
        return {"relative": ((found - exact).norm() / exact.norm()).item(), "direction": (1 - cos).item()}

    costs = [
        {
            "rounded": {"layer": layer, "kind": kind},
            "alone": error([(layer, kind)]),
            "others": error([site for site in sites if site != (layer, kind)]),
        }
        for layer, kind in sites
    ]
    return {"all": error(sites), "sites": costs}


with open(sys.argv[1]) as cases:
    print(json.dumps([of_case(*case) for case in json.load(cases)]))
