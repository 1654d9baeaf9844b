"""A task of some steps with `browser-use`, which sends a screenshot with each of them, in a browser without a window.

Arguments: the server's address, the page's, the program of Chromium.
"""

import asyncio
import sys

from browser_use import Agent, Browser, ChatOpenAI


async def main() -> None:
    server, page, program = sys.argv[1:]
    browser = Browser(
        headless=True,
        chromium_sandbox=False,
        executable_path=program,
        enable_default_extensions=False,
        viewport={"width": 640, "height": 480},
    )
    model = ChatOpenAI(model="tiny", base_url=f"{server}/v1", api_key="none", max_retries=0)
    agent = Agent(task=f"Open {page} and say which color it has.", llm=model, browser=browser, use_judge=False)
    print((await agent.run(max_steps=6)).final_result())


asyncio.run(main())
