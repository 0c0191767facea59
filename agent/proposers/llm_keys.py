"""Which key a model needs, and keeping keys out of everything that is stored or sent. Pure; no litellm.

Does not know every provider: for one that is not listed here litellm itself says at the first call what is missing.
"""

import re
from collections.abc import Callable, Mapping

from agent.errors import InputError
from agent.harness_client import SECRET_NAME
from agent.records import LanguageModel

KEYS: Mapping[str, tuple[str, ...]] = {
    "openai": ("OPENAI_API_KEY",),
    "anthropic": ("ANTHROPIC_API_KEY",),
    "gemini": ("GEMINI_API_KEY", "GOOGLE_API_KEY"),
    "openrouter": ("OPENROUTER_API_KEY",),
    "deepseek": ("DEEPSEEK_API_KEY",),
    "mistral": ("MISTRAL_API_KEY",),
    "groq": ("GROQ_API_KEY",),
    "xai": ("XAI_API_KEY",),
    "together_ai": ("TOGETHERAI_API_KEY", "TOGETHER_API_KEY"),
    "fireworks_ai": ("FIREWORKS_AI_API_KEY", "FIREWORKS_API_KEY"),
    "cerebras": ("CEREBRAS_API_KEY",),
    "cohere": ("COHERE_API_KEY", "CO_API_KEY"),
    "azure": ("AZURE_API_KEY",),
    "moonshot": ("MOONSHOT_API_KEY",),
    "dashscope": ("DASHSCOPE_API_KEY",),
    "perplexity": ("PERPLEXITYAI_API_KEY", "PERPLEXITY_API_KEY"),
}
EXAMPLES: Mapping[str, str] = {
    "openai": "openai/MODEL",
    "anthropic": "anthropic/MODEL",
    "gemini": "gemini/MODEL",
    "openrouter": "openrouter/VENDOR/MODEL",
}
BARE_NAMES = (
    (re.compile(r"(gpt-|chatgpt-|o\d)"), "openai"),
    (re.compile(r"claude"), "anthropic"),
    (re.compile(r"gemini"), "gemini"),
    (re.compile(r"deepseek"), "deepseek"),
    (re.compile(r"grok"), "xai"),
)
SHORTEST_SECRET = 8
HIDDEN = "[hidden]"


def provider_of(model: str) -> str:
    """The provider that a model name means, "" when this page does not know."""
    prefix, slash, _ = model.partition("/")
    if slash:
        return prefix if prefix in KEYS else ""
    return next((name for pattern, name in BARE_NAMES if pattern.match(model)), "")


def check(models: tuple[LanguageModel, ...], environment: Mapping[str, str]) -> None:
    """Refuse, before any work, what cannot be asked; raises InputError naming the variable to set."""
    if not models:
        raise InputError(
            "--proposer llm needs a model: --llm MODEL (such as --llm anthropic/MODEL, or --llm NAME --api-base"
            " http://127.0.0.1:8000/v1 for a local server), or llm.models in overnight.yaml."
        )
    for one in models:
        _check_one(one, environment)


def _check_one(one: LanguageModel, environment: Mapping[str, str]) -> None:
    if not one.model.strip() or one.model.endswith("/"):
        raise InputError(f"--llm {one.model!r} names no model: write it as PROVIDER/MODEL.")
    if one.api_base is not None and not re.fullmatch(r"https?://[^/\s]+(/\S*)?", one.api_base):
        raise InputError(f"--api-base {one.api_base} must be a URL such as http://127.0.0.1:8000/v1.")
    if one.api_key_env is not None:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", one.api_key_env):
            raise InputError("api_key_env must be the name of an environment variable, never the key itself.")
        if not SECRET_NAME.search(one.api_key_env):
            raise InputError(
                f"api_key_env: {one.api_key_env} is not named like a key, so it would not be kept from other processes:"
                " call the variable ..._API_KEY."
            )
        if not environment.get(one.api_key_env):
            raise InputError(f"{one.model}: the environment variable {one.api_key_env} (api_key_env) is not set.")
        return
    names = KEYS.get(provider_of(one.model), ())
    if one.api_base is None and names and not any(environment.get(name) for name in names):
        raise InputError(
            f"{one.model} needs a key: export {' or '.join(names)}, name another variable with api_key_env, or give"
            " --api-base of a local server."
        )


def key_of(one: LanguageModel, environment: Mapping[str, str]) -> str | None:
    """The key to send. A server of the user's own gets the one they named for it and no other; None: litellm's rule."""
    if one.api_key_env is not None:
        return environment.get(one.api_key_env)
    return "not-needed" if one.api_base is not None else None


def present(environment: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Which known keys are set, and the model name that would use each; never a value."""
    found = []
    for provider, names in KEYS.items():
        found += [(name, EXAMPLES.get(provider, f"{provider}/MODEL")) for name in names if environment.get(name)]
    return tuple(found)


def hider(environment: Mapping[str, str], models: tuple[LanguageModel, ...] = ()) -> Callable[[str], str]:
    """A function that takes every secret of the environment out of a text."""
    named = {one.api_key_env for one in models}
    secrets = {
        value
        for name, value in environment.items()
        if (name in named or SECRET_NAME.search(name)) and len(value.strip()) >= SHORTEST_SECRET
    }
    if not secrets:
        return lambda text: text
    pattern = re.compile("|".join(re.escape(value) for value in sorted(secrets, key=len, reverse=True)))
    return lambda text: pattern.sub(HIDDEN, text)
