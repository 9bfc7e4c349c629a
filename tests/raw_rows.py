"""Raw records in the schemas and with the quirks of ten public datasets."""

from typing import Any

RAW: dict[str, list[dict[str, Any]]] = {
    "deepswe_kimi": [
        {
            "messages": [
                {"role": "system", "content": "You fix code. Call one tool per turn as <function=...>."},
                {"role": "user", "content": "The sum() helper returns 3 for [1,1]. Fix it."},
                {
                    "role": "assistant",
                    "content": "I will look first.\n\n<function=execute_bash>\n<parameter=command>cat util.py</parameter>\n</function>",
                },
                {"role": "user", "content": "EXECUTION RESULT of [execute_bash]:\ndef sum(x): return len(x)+1"},
                {"role": "assistant", "content": "<function=finish>\n<parameter=message>done</parameter>\n</function>"},
            ]
        },
        {
            "messages": [
                {"role": "user", "content": "Explain the token <|im_middle|> in one line."},
                {"role": "assistant", "content": "</think>\n\nIt separates role and text."},
            ]
        },
    ],
    "kimi_2000x": [
        {
            "id": "q_17",
            "problem": "How many legs have 3 spiders?",
            "thinking": "8 each, 3*8.",
            "solution": "24",
            "difficulty": "easy",
            "category": "math",
        },
        {"instruction": "Write one line on rain.", "thought": "keep it short", "response": "Rain taps the tin roof."},
        {
            "row_hash": "ab12",
            "row_json": '{"messages":[{"role":"user","content":"Hi"},{"role":"assistant","content":"<think>greet</think>Hello"}]}',
        },
        {"foo": "x", "bar": 1},
    ],
    "glaive": [
        {
            "system": "SYSTEM: You may use these functions -\n"
            '{"name": "tip", "description": "tip amount", "parameters": {"type": "object", "properties": {"bill": {"type": '
            '"number"}, "who": {"type": "string"}}, "required": ["bill"]}}',
            "chat": "USER: Tip on 40 at Joe's?\n"
            "\n"
            "\n"
            'ASSISTANT: <functioncall> {"name": "tip", "arguments": \'{"bill": 40, "who": "Joe\'s"}\'} <|endoftext|>\n'
            "\n"
            "\n"
            'FUNCTION RESPONSE: {"tip": 6}\n'
            "\n"
            "\n"
            "ASSISTANT: Six. <|endoftext|>\n"
            "\n"
            "\n",
        },
        {
            "system": "SYSTEM: You are helpful, with no access to external functions.",
            "chat": "USER: Hello\n\n\nASSISTANT: Hi! <|endoftext|>\n\n\nUSER: Bye",
        },
    ],
    "opencode_instruct": [
        {
            "id": "oc1",
            "input": "Write f(n) that doubles n.",
            "output": "```python\ndef f(n):\n    return 2*n\n```",
            "domain": "generic",
            "generation_algorithm": "self-instruct",
            "llm_judgement": '{"logic": {"score": 5}}',
            "unit_tests": '["assert f(2)==4"]',
            "tests_execution_status": '["pass"]',
            "average_test_score": "1.0",
        },
        {
            "id": "",
            "input": "Reverse a string.",
            "output": "",
            "domain": "algorithmic",
            "generation_algorithm": "evol-instruct",
            "llm_judgement": "",
            "unit_tests": "[]",
            "tests_execution_status": "[]",
            "average_test_score": "",
        },
    ],
    "magicoder": [
        {"instruction": "Turn this loop into a list comprehension:\nfor x in a: b.append(x*x)", "response": "b=[x*x for x in a]"},
        {"instruction": "Turn this loop into a list comprehension:\nfor x in a: b.append(x*x) ", "response": "Use: `b = [x*x for x in a]`"},
    ],
    "mixture_of_thoughts": [
        {
            "messages": [
                {"content": "Is 91 prime?", "role": "user"},
                {"content": "<think>\n7*13=91.\n</think>\n\nNo, 91 = 7 x 13.", "role": "assistant"},
            ],
            "num_tokens": 21,
            "source": "math-x",
        },
        {
            "messages": [{"content": "Prove it.", "role": "user"}, {"content": "<think>\nassume that", "role": "assistant"}],
            "num_tokens": 4,
            "source": "sci-y",
        },
    ],
    "openthoughts": [
        {
            "system": "First think between <|begin_of_thought|> and <|end_of_thought|>, then answer.",
            "conversations": [
                {"from": "user", "value": "Return your final response within \\boxed{}. 5*6?"},
                {
                    "from": "assistant",
                    "value": "<|begin_of_thought|>\n"
                    "\n"
                    "thirty\n"
                    "\n"
                    "<|end_of_thought|>\n"
                    "\n"
                    "<|begin_of_solution|>\n"
                    "\n"
                    "\\boxed{30}\n"
                    "\n"
                    "<|end_of_solution|>",
                },
            ],
        },
        {
            "problem": "Sort a list.",
            "deepseek_reasoning": "use sorted",
            "deepseek_solution": "sorted(x)",
            "ground_truth_solution": None,
            "domain": "code",
            "source": "s",
            "test_cases": None,
            "starter_code": None,
        },
    ],
    "ultrachat": [
        {
            "prompt": "Name a river.",
            "prompt_id": "9f01",
            "messages": [
                {"content": "Name a river.", "role": "user"},
                {"content": "The Po.", "role": "assistant"},
                {"content": "Where is it?", "role": "user"},
                {"content": "Italy.", "role": "assistant"},
            ],
        },
        {"prompt": "Write a haiku.", "prompt_id": "9f02", "messages": [{"content": "Write a haiku.", "role": "user"}]},
    ],
    "sharegpt": [
        {"id": "Kq7_0", "conversations": []},
        {
            "id": "Kq7_2",
            "conversations": [
                {"from": "gpt", "value": "...and that is step 3."},
                {"from": "human", "value": "Go on"},
                {"from": "bing", "value": "Step 4 is to test."},
                {"from": "human", "value": "ok"},
            ],
        },
        {
            "id": "Zz1_0",
            "conversations": [
                {"from": "system", "value": "Reply in German."},
                {"from": "user", "value": "Hello"},
                {"from": "chatgpt", "value": "Hallo!"},
            ],
        },
        {
            "id": "Zz2_0",
            "conversations": [
                {"from": "human", "value": "why"},
                {"from": "gpt", "value": "!Too many requests in 1 hour. Try again later."},
            ],
        },
    ],
    "swe_agent": [
        {
            "instance_id": "acme__lib-12",
            "model_name": "swe-agent-llama-70b",
            "target": False,
            "trajectory": [
                {
                    "cutoff_date": "01.01.2023",
                    "mask": False,
                    "role": "system",
                    "system_prompt": "You control a shell. One command per turn.",
                    "text": None,
                },
                {"cutoff_date": None, "mask": False, "role": "user", "system_prompt": None, "text": "ISSUE: parse('') crashes."},
                {"cutoff_date": None, "mask": False, "role": "ai", "system_prompt": None, "text": "Look first.\n```\nls\n```"},
                {
                    "cutoff_date": None,
                    "mask": False,
                    "role": "user",
                    "system_prompt": None,
                    "text": "parse.py\n(Open file: n/a)\n(Current directory: /lib)\nbash-$",
                },
                {"cutoff_date": None, "mask": False, "role": "ai", "system_prompt": None, "text": "```\nsubmit\n```"},
            ],
            "exit_status": "submitted",
            "generated_patch": "",
            "eval_logs": "",
        },
        {
            "instance_id": "acme__lib-12",
            "model_name": "swe-agent-llama-8b",
            "target": False,
            "trajectory": [
                {"cutoff_date": None, "mask": True, "role": "user", "system_prompt": None, "text": "ISSUE: parse('') crashes."},
                {"cutoff_date": None, "mask": True, "role": "ai", "system_prompt": None, "text": None},
            ],
            "exit_status": "early_exit",
            "generated_patch": None,
            "eval_logs": None,
        },
    ],
}
