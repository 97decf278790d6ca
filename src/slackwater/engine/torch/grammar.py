"""From a grammar's source to a matcher of llguidance, within limits. Imports little: a trial begins with it."""

from typing import Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from slackwater.errors import InvalidInputError
from slackwater.rollout.grammar import Grammar, GrammarKind

LIMITS: Final = LLParserLimits(
    max_items_in_row=1000,
    initial_lexer_fuel=400_000,
    step_lexer_fuel=100_000,
    step_max_items=20_000,
    max_lexer_states=50_000,
    max_grammar_size=100_000,
    precompute_large_lexemes=False,
    verbose_errors=False,
)
"""What one matcher may use up. `slackwater.engine.torch.grammar_trial` bounds what a step takes."""
_BLANKS: Final = r"[\x20\x0A\x0D\x09]{1,20}"
"""Between the parts of a JSON value: indented values fit, and an answer can't be lost in blanks."""
_SHOWN: Final = 200
"""Characters of what the library says that a reader is shown."""


def compiled(grammar: Grammar, tokenizer: LLTokenizer) -> LLMatcher:
    """A matcher before its first token. Blocks, without the interpreter's lock.

    Matchers of one grammar are made apart: copies of one would share what their limits count.

    Raises:
        InvalidInputError: The source can't be read, asks for what the library lacks, or passes a limit.
    """
    matcher = LLMatcher(tokenizer, _definition(grammar), log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise refused(grammar, matcher.get_error())
    return matcher


def refused(grammar: Grammar, why: str) -> InvalidInputError:
    """The error that says so."""
    said = why.strip().partition("\n<")[0][:_SHOWN]
    return InvalidInputError(f"grammar is refused: the {grammar.kind} can't be followed: {said}", hint=way_out(grammar))


def way_out(grammar: Grammar) -> str:
    """What to send instead of one that can't be followed."""
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return "send a JSON schema, in simpler terms where it asks for too much"
        case GrammarKind.REGEX:
            return "send a regular expression without look-around and back references"
        case GrammarKind.EBNF:
            return "send a grammar with a rule 'start:' in Lark's syntax, or with a rule 'root ::=' in GBNF"


def _definition(grammar: Grammar) -> str:
    """As the library takes it."""
    try:
        match grammar.kind:
            case GrammarKind.JSON_SCHEMA:
                return LLMatcher.grammar_from_json_schema(grammar.source, defaults={"whitespace_pattern": _BLANKS})
            case GrammarKind.REGEX:
                return LLMatcher.grammar_from_regex(grammar.source)
            case GrammarKind.EBNF:
                return LLMatcher.grammar_from_lark(_lark(grammar))
    except InvalidInputError:
        raise
    except ValueError as error:
        raise refused(grammar, str(error)) from error


def _lark(grammar: Grammar) -> str:
    try:
        return any_to_lark(grammar.source)
    except RecursionError as error:
        raise refused(grammar, "it is nested too deeply") from error
    except Exception as error:  # the reader of GBNF raises no less: of a rule that is missing, for one
        raise refused(grammar, str(error)) from error
