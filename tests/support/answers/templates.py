"""Parts of chat templates by which the formats of published models can be told; in few words, not the templates.

Each has the marks around tools, calls and reasoning as the template has them.
"""

from server.settings import ReasoningParser, ToolCallParser

_FORM, _REASONING = ToolCallParser, ReasoningParser
_THINK = "<think>{{ m.reasoning_content }}</think>"
_TOOLS = "<tools>{{ tools | tojson }}</tools>"
_OBJECT = '<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>'
_FUNCTION = "<tool_call>\\n<function=example>\\n<parameter=key>\\nvalue\\n</parameter>\\n</function>\\n</tool_call>"
_GLM = "<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>"
_DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"

_COHERE = (
    "{{ tools }}<|START_THINKING|>{{ m.reasoning_content }}<|END_THINKING|>"
    '<|START_ACTION|>[{"tool_name": "{{ n }}", "parameters": {{ a }}}]<|END_ACTION|>'
)

# By model: source, format of calls, marks of reasoning.
TEMPLATES: dict[str, tuple[str, ToolCallParser, ReasoningParser]] = {
    "Qwen2.5, Granite 4": (_TOOLS + _OBJECT, _FORM.HERMES, _REASONING.NONE),
    "Qwen3": (_TOOLS + _OBJECT + _THINK, _FORM.HERMES, _REASONING.THINK),
    "Qwen3-Coder": (_TOOLS + _FUNCTION, _FORM.QWEN3_CODER, _REASONING.NONE),
    "Qwen3.5, Nemotron 3": (_TOOLS + _FUNCTION + _THINK, _FORM.QWEN3_CODER, _REASONING.THINK),
    "Step-3.5, Step-3.7": (
        _TOOLS + _FUNCTION + _THINK + "<|im_start|>tool_response\\n",
        _FORM.STEP3P5,
        _REASONING.THINK,
    ),
    "MiMo-V2": (
        _TOOLS + "<tool_call>\\n<function=example_function_name>\\n<parameter=example_parameter_1>value_1</parameter>"
        "\\n</function>\\n</tool_call>" + _THINK,
        _FORM.MIMO,
        _REASONING.THINK,
    ),
    "Seed-OSS": (
        "{{ tools }}<seed:tool_call>\\n<function=example>\\n<parameter=key>value</parameter>\\n</function>\\n"
        "</seed:tool_call>\\n<seed:think>{{ m.reasoning_content }}</seed:think>",
        _FORM.SEED_OSS,
        _REASONING.SEED_OSS,
    ),
    "GLM-4.5, GLM-4.6": (_TOOLS + "<tool_call>{function-name}\n" + _GLM + _THINK, _FORM.GLM45, _REASONING.THINK),
    "GLM-4.7": (
        _TOOLS + "<tool_call>{function-name}<arg_key>{{ k }}</arg_key><arg_value>{{ v }}</arg_value>" + _THINK,
        _FORM.GLM47,
        _REASONING.THINK,
    ),
    "Laguna-XS": (
        "<available_tools>{{ tools }}<tool_call>name\\n" + _GLM + _THINK,
        _FORM.POOLSIDE_V1,
        _REASONING.THINK,
    ),
    "Laguna-S": (
        "<available_tools>{{ tools }}<tool_call>{{ n }}<arg_key>{{ k }}</arg_key><arg_value>{{ v }}</arg_value>"
        + _THINK,
        _FORM.POOLSIDE_V1,
        _REASONING.THINK,
    ),
    "Hy3": (
        "{{ tools }}{{ '<tool_calls{}>'.format(T) }}{{ '<tool_call{}>'.format(T) }}{{ '<tool_sep{}>'.format(T) }}"
        "{{ '<arg_key{}>'.format(T) }}{{ '<think{}>'.format(T) }}",
        _FORM.HY_V3,
        _REASONING.HY_V3,
    ),
    "MiniMax-M2": (
        '<tools>{{ tools }}<minimax:tool_call>\\n<invoke name="{{ n }}">\\n<parameter name="{{ k }}">{{ v }}'
        "</parameter></invoke></minimax:tool_call>\n<response>{{ m.content }}</response>" + _THINK,
        _FORM.MINIMAX_M2,
        _REASONING.THINK,
    ),
    "Kimi-K2": (
        "<|im_system|>tool_declare<|im_middle|>{{ tools }}<|tool_calls_section_begin|><|tool_call_begin|>"
        "<|tool_call_argument_begin|>",
        _FORM.KIMI_K2,
        _REASONING.NONE,
    ),
    "Kimi-K2-Thinking": (
        "{{ tools }}<|tool_calls_section_begin|><|tool_call_begin|><|tool_call_argument_begin|>" + _THINK,
        _FORM.KIMI_K2,
        _REASONING.THINK,
    ),
    "DeepSeek-V3, R1": (
        f"{{{{ tools }}}}{_DEEPSEEK}function<｜tool▁sep｜>{{{{ n }}}}\\n```json\\n",
        _FORM.DEEPSEEK_V3,
        _REASONING.NONE,
    ),
    "DeepSeek-V3.1": (
        f"{{{{ tools }}}}{_DEEPSEEK}{{{{ n }}}}<｜tool▁sep｜></think>",
        _FORM.DEEPSEEK_V31,
        _REASONING.THINK,
    ),
    "DeepSeek-V3.2": (
        "{% set d = '｜DSML｜' %}{{ '<' + d + 'function_calls>' }}{{ tools }}{{ '<' + d + 'invoke name=' }}" + _THINK,
        _FORM.DEEPSEEK_V32,
        _REASONING.THINK,
    ),
    "functionary v3.1": (
        '{{ tools }}<function=example>{"a": 1}</function><|python_tag|>',
        _FORM.FUNCTIONARY_V31,
        _REASONING.NONE,
    ),
    "functionary v3.2": ("{{ tools }}>>>${recipient}\\n${content} >>>all\\n", _FORM.FUNCTIONARY_V32, _REASONING.NONE),
    "Granite 3.0 to 3.2": (
        "<|start_of_role|>available_tools<|end_of_role|>{{ tools }}respond with <|tool_call|> and a JSON list",
        _FORM.GRANITE,
        _REASONING.NONE,
    ),
    "Granite 3.3": (
        "<|start_of_role|>{{ tools }}only with <|tool_call|>; thoughts between <think></think>, the answer between "
        "<response></response>",
        _FORM.GRANITE,
        _REASONING.GRANITE,
    ),
    "Phi-4-mini": ("{{ m['tools'] }}<|tool|>{{ m['tools'] }}<|/tool|>", _FORM.PHI4_MINI, _REASONING.NONE),
    "Phi-4-mini, as vLLM has it": (
        '{{ tools }}functools[{"name": [function name], "arguments": [arguments]}, ...]',
        _FORM.PHI4_MINI,
        _REASONING.NONE,
    ),
    "Hunyuan-A13B": (
        '{{ tools }}<tool_calls>[{"name": "f", "arguments": {}}]</tool_calls><think>\\n\\n</think>',
        _FORM.HUNYUAN_A13B,
        _REASONING.THINK,
    ),
    "Hunyuan, dense": (
        _TOOLS + "you should first print <tool_calls><tool_call>function_name\\n```json\\n{}\\n```</tool_call>"
        "{{ m.content.split('<answer>')[-1] }}<|extra_0|><think>\\n\\n</think>",
        _FORM.HUNYUAN_DENSE,
        _REASONING.HUNYUAN_A13B,
    ),
    "Command R7B, Command A": (
        _COHERE + "<|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|>",
        _FORM.COHERE3,
        _REASONING.COHERE3,
    ),
    "Command A Plus, North Mini Code": (
        _COHERE + "<|START_TEXT|>{{ m.content }}<|END_TEXT|>",
        _FORM.COHERE4,
        _REASONING.COHERE4,
    ),
    "Apriel 1.5": (
        '{{ tools }}within <tool_call></tool_call> tags <tool_calls>[{"name": n, "arguments": a}]</tool_calls>',
        _FORM.HUNYUAN_A13B,
        _REASONING.NONE,
    ),
    "Nemotron Nano 2, Nemotron Super 1.5": (
        '{{ tools }}<TOOLCALL>[{"name": "n", "arguments": "a"}]</TOOLCALL>' + _THINK,
        _FORM.NEMOTRON_JSON,
        _REASONING.THINK,
    ),
    "Llama 3.1, Llama 3.3": (
        '{{ tools }}{"name": function name, "parameters": dictionary} <|python_tag|>',
        _FORM.LLAMA3_JSON,
        _REASONING.NONE,
    ),
    "Llama 3.2": ('{{ tools }}{"name": function name, "parameters": dictionary}', _FORM.LLAMA3_JSON, _REASONING.NONE),
    "Llama 3.2 and 4 as pythonic, ToolACE": (
        "{{ tools }}[func_name1(params_name1=params_value1), func_name2(params)]",
        _FORM.PYTHONIC,
        _REASONING.NONE,
    ),
    "LFM2": ("List of tools: <|tool_list_start|>[{{ tools }}]<|tool_list_end|>", _FORM.LFM2, _REASONING.NONE),
    "LFM2.5": ("{{ tools }}<|tool_call_start|>[{{ c }}]<|tool_call_end|>" + _THINK, _FORM.LFM2, _REASONING.THINK),
    "LFM2.5-Instruct": ('<|im_start|>{{ "List of tools: [" }}{{ tools }}"</think>"', _FORM.LFM2, _REASONING.THINK),
    "OLMo 3": ("{{ tools }}<function_calls>{{ c }}</function_calls>", _FORM.OLMO3, _REASONING.NONE),
    "Mistral": ("{{ tools }}[TOOL_CALLS][AVAILABLE_TOOLS]", _FORM.MISTRAL, _REASONING.NONE),
    "Magistral": ("{{ tools }}[TOOL_CALLS][THINK]{{ t }}[/THINK]", _FORM.MISTRAL, _REASONING.MISTRAL),
    "gpt-oss": ("{{ tools }}<|channel|>analysis<|message|>", _FORM.HARMONY, _REASONING.HARMONY),
    "Gemma 4": (
        "{{ tools }}<|tool_call>call:{{ n }}<tool_call|><|channel>thought<channel|>",
        _FORM.GEMMA,
        _REASONING.GEMMA,
    ),
}
# By model: templates with tools in a format that is not read.
OTHERS = {
    "DeepSeek V4": "{{ tools }}<｜DSML｜tool_calls><｜DSML｜invoke name=",
    "MiniMax M3": "{{ tools }}{{ ']<]minimax[>[' }}<tool_call><invoke name=",
    "Apertus": '{{ tools }}<|tools_prefix|>[{"{{ n }}": {{ a }}}]<|tools_suffix|><|inner_prefix|>',
    "FunctionGemma": "{{ tools }}<start_function_call>call:{{ n }}<end_function_call>",
    "MiniCPM5": '{{ tools }}<function name="{{ n }}"><param name="{{ k }}">{{ v }}</param></function><tool_sep>',
    "Muse Glimmer": "{{ tools }}<atem:function_calls>",
    "InternLM2": "{{ tools }}<|action_start|><|plugin|><|action_end|>",
}
