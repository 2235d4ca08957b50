# ruff: noqa: E501, SIM905
"""Where does a needle land? Retrieval of the U-shape summary in both languages, by depth.

A sentence that answers a question is hidden in a long text at a given depth. Measured is only whether
that sentence is among the passages that are repeated at the prompt's end, not what a model makes of it.
Three kinds of question: in the sentence's own words, with other forms of them, and a paraphrase that
shares one word. The filler talks of the same things (keys, flights, passwords, choirs) and has no answer;
half of the needles have a decoy beside that, a sentence about the very same thing.

Run: python -m tests.bench.pilot_needle [--length 60000]
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence

from thunder_patches.pilot import ushape
from thunder_patches.pilot.ushape import Settings, select

# needle; question in its words; in other forms; a paraphrase that shares one word; decoy or ""
ENGLISH = [
    ("The spare key for the boathouse hangs behind the blue barometer.",
     "Where does the spare key for the boathouse hang?", "Where are spare keys of boathouses kept?",
     "How do I get into the boathouse if I am locked out?", "The boathouse was painted in May."),
    ("Marisol's flight to Lisbon leaves at 6:40 from gate C17.",
     "When does Marisol's flight to Lisbon leave?", "At what gate do flights for Lisbon leave?",
     "What time must Marisol be at the airport?", "Lisbon is pleasant in spring."),
    ("The database password rotates every 45 days, on a Tuesday.",
     "How often does the database password rotate?", "What day are database passwords rotated?",
     "When will my password stop working?", ""),
    ("Grandmother's plum cake needs two spoons of cardamom.",
     "How much cardamom does the plum cake need?", "How many spoons of cardamom are needed in plum cakes?",
     "Which spice makes the cake special?", "The cake was gone by noon."),
    ("Ticket 4471 was closed because the sensor had been mounted upside down.",
     "Why was ticket 4471 closed?", "Why are they closing ticket 4471?",
     "What was wrong with the sensor?", "Several tickets were closed in March."),
    ("The village of Ostrava Dol has exactly nineteen inhabitants.",
     "How many inhabitants does Ostrava Dol have?", "How many people inhabit the village Ostrava Dol?",
     "What is the population of the village?", ""),
    ("Backups older than ninety days are moved to the vault in Turku.",
     "Where are backups older than ninety days moved?", "Where do we move an old backup?",
     "What happens with a backup from last year?", "A backup takes about an hour."),
    ("Professor Ilves keeps her rarest beetle in a matchbox labelled Friday.",
     "Where does Professor Ilves keep her rarest beetle?", "In what does the professor keep rare beetles?",
     "How can I find the beetle?", ""),
    ("The maximum payload of the new drone is 2.4 kilograms.",
     "What is the maximum payload of the new drone?", "What payloads can new drones have at most?",
     "How heavy a parcel can the drone lift?", "The drone arrived in two boxes."),
    ("The choir meets in the old tannery whenever the church is too cold.",
     "Where does the choir meet when the church is too cold?", "Where are choirs meeting in cold weather?",
     "Where should I go to sing with the choir in January?", "The choir has thirty members."),
    ("Setting retry_limit above seven makes the gateway drop its session.",
     "What happens if retry_limit is set above seven?", "Why does the gateway drop sessions?",
     "Why am I logged out by the gateway?", ""),
    ("Anselm repaired the clock with a hairpin and a piece of orange peel.",
     "With what did Anselm repair the clock?", "What were the clock repairs by Anselm done with?",
     "How was the clock made to run again?", "The clock stands in the hall."),
]  # fmt: skip
CHINESE = [
    ("船屋的备用钥匙挂在蓝色气压计的后面。", "船屋的备用钥匙挂在哪里？", "备用的船屋钥匙放哪儿了？",
     "我被锁在外面，怎么进船屋？", "船屋五月刚刷过漆。"),
    ("玛丽索飞往里斯本的航班六点四十分从C17登机口起飞。", "玛丽索飞往里斯本的航班几点起飞？",
     "去里斯本的飞机在哪个登机口？", "玛丽索应该几点到机场登机？", "里斯本的春天很舒服。"),
    ("数据库密码每四十五天更换一次，固定在星期二。", "数据库密码多久更换一次？", "星期几换数据库的密码？",
     "我的密码什么时候失效？", ""),
    ("外婆的李子蛋糕要放两勺豆蔻粉。", "李子蛋糕要放几勺豆蔻粉？", "做李子蛋糕豆蔻放多少？",
     "蛋糕里用的是哪种香料？", "蛋糕中午就吃完了。"),
    ("工单4471被关闭，原因是传感器装反了。", "工单4471为什么被关闭？", "关闭4471号工单的原因？",
     "传感器出了什么问题？", "三月份关闭了好几个工单。"),
    ("奥斯特村一共只有十九口人。", "奥斯特村一共有多少人？", "奥斯特这个村有几口人？",
     "那个村庄的人口规模如何？奥斯特呢？", ""),
    ("超过九十天的备份会转移到图尔库的保险库。", "超过九十天的备份转移到哪里？", "旧备份会被转到什么地方？",
     "去年的备份后来怎么处理？", "一次备份大约需要一个小时。"),
    ("伊尔教授把最稀有的甲虫放在写着星期五的火柴盒里。", "伊尔教授最稀有的甲虫放在哪里？",
     "教授的稀有甲虫装在什么盒子里？", "怎样才能找到那只甲虫？", ""),
    ("新无人机的最大载重是二点四公斤。", "新无人机的最大载重是多少？", "这款无人机最多能载多重？",
     "无人机能送多大的包裹？", "无人机装在两个箱子里寄来了。"),
    ("教堂太冷的时候，合唱团在旧皮革厂集合。", "教堂太冷的时候合唱团在哪里集合？", "天冷时合唱团去哪儿集合？",
     "一月份想唱歌，该去哪里找合唱团？", "合唱团有三十名成员。"),
    ("把重试上限设成七以上，网关就会断开会话。", "重试上限设成七以上会怎样？", "网关为什么断开会话？",
     "为什么我总被网关踢下线？", ""),
    ("安塞姆用一根发卡和一块橘子皮修好了座钟。", "安塞姆用什么修好了座钟？", "座钟是安塞姆拿什么修的？",
     "那座钟后来为什么又能走了？", "座钟摆在大厅里。"),
]  # fmt: skip
KINDS = ("same words", "other forms", "paraphrase")
DEPTHS = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)

WHO = "The gardener|A visitor|The older brother|Our neighbour|The captain|A clerk|The baker|Nobody".split(
    "|"
)
DID = (
    "walked along|forgot about|described|counted|painted|sold|looked for|wrote a letter about|avoided|"
    "measured|dreamt of|argued over"
).split("|")
WHAT = (
    "the harbour|a wooden chair|three lamps|the north road|an empty bottle|the summer market|a sack of flour|"
    "the broken fence|old newspapers|the river bank|a pair of boots|the choir book|the last backup|a sensor|"
    "the boathouse|a spare key|the flight to Lisbon|the airport gate|the database password|a plum cake|"
    "an old ticket|the village|a rare beetle|the matchbox|the new drone|the choir|the gateway|the clock"
).split("|")
HOW = (
    "before the rain came|without much hope|for the second time|as the bells rang|and said nothing|while the "
    "others slept|although it was late|in spite of the cold|because the door was open|under a grey sky"
).split("|")
WHO_ZH = "园丁|一位客人|哥哥|邻居|船长|店员|面包师|没有人|老师|孩子们".split("|")
DID_ZH = "走过了|忘记了|说起|数了数|画下|卖掉了|寻找|写信谈到|避开|量了量|梦见|争论着".split("|")
WHAT_ZH = "港口|一把木椅|三盏灯|北边的路|空瓶子|夏天的集市|一袋面粉|坏了的篱笆|旧报纸|河岸|一双靴子|歌本|钥匙圈|船屋|备用钥匙|里斯本的航班|登机口|数据库密码|李子蛋糕|旧工单|那个村庄|稀有的甲虫|火柴盒|新无人机|合唱团|网关|座钟".split(
    "|"
)
HOW_ZH = "在下雨之前|没有抱太大希望|这是第二次|钟声正响|什么也没说|别人都睡了|虽然已经很晚|因为门开着|天色灰蒙蒙的".split(
    "|"
)


def haystack(language: str, length: int, rng: random.Random) -> list[str]:
    """Filler sentences of about ``length`` characters in paragraphs of five."""
    sentences: list[str] = []
    size = 0
    while size < length:
        if language == "en":
            line = " ".join(rng.choice(part) for part in (WHO, DID, WHAT, HOW)) + ". "
        else:
            line = "，".join(
                ("".join(rng.choice(p) for p in (WHO_ZH, DID_ZH, WHAT_ZH)), rng.choice(HOW_ZH))
            )
            line += "。"
        if len(sentences) % 5 == 4:
            line = line.rstrip() + "\n\n"
        sentences.append(line)
        size += len(line)
    return sentences


TOKENIZE = ushape.tokenize
Method = Callable[[str, str], Sequence[str]]


def bm25(text: str, query: str) -> Sequence[str]:
    return select([text], query, Settings())


def first_sentences(text: str, query: str) -> Sequence[str]:
    """Control: what a summary without any ranking would hold."""
    return [text[: Settings().summary]]


def random_chunks(text: str, query: str) -> Sequence[str]:
    """Control: two random chunks, as much text as the summary may have."""
    rng = random.Random(query)
    at = [rng.randrange(max(1, len(text) - 600)) for _ in range(2)]
    return [text[a : a + 600] for a in at]


def landed(needle: str, passages: Sequence[str]) -> bool:
    flat = " ".join(" ".join(passages).split())
    return needle in flat


def measure(language: str, length: int, method: Method, kinds: Sequence[int] = (0, 1, 2)) -> dict:
    """Share of needles found, by (kind of question, depth)."""
    needles = ENGLISH if language == "en" else CHINESE
    found: dict[tuple[int, float], list[bool]] = {}
    for number, (needle, *questions, decoy) in enumerate(needles):
        for depth in DEPTHS:
            rng = random.Random(f"{number} {depth}")
            hay = haystack(language, length, rng)
            if decoy:
                hay.insert(rng.randrange(len(hay)), decoy + " ")
            hay.insert(round(depth * len(hay)), needle + " ")
            text = "".join(hay)
            for kind in kinds:
                found.setdefault((kind, depth), []).append(
                    landed(needle, method(text, questions[kind]))
                )
    return {key: sum(hits) / len(hits) for key, hits in found.items()}


def table(title: str, result: dict) -> None:
    print(f"  {title}")
    for kind, name in enumerate(KINDS):
        row = [result[kind, depth] for depth in DEPTHS if (kind, depth) in result]
        if row:
            print(
                f"    {name:<12}"
                + "".join(f"{v:>6.2f}" for v in row)
                + f"   all {sum(row) / len(row):.2f}"
            )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--length", type=int, default=40_000, help="characters of the haystack")
    parser.add_argument(
        "--controls", action="store_true", help="also without ranking, and by chance"
    )
    arguments = parser.parse_args()
    print("depth" + " " * 11 + "".join(f"{d:>6}" for d in DEPTHS))
    for language in ("en", "zh"):
        print(f"{language}, {arguments.length:,} characters, 12 needles")
        table(
            "BM25 (Chinese: characters and pairs of them)",
            measure(language, arguments.length, bm25),
        )
        if language == "zh":
            for title, tokenizer in chinese_alternatives():
                original, ushape.tokenize = ushape.tokenize, tokenizer
                table(title, measure(language, arguments.length, bm25))
                ushape.tokenize = original
        if arguments.controls:
            table("first sentences (control)", measure(language, arguments.length, first_sentences))
            table("random chunks (control)", measure(language, arguments.length, random_chunks))


def chinese_alternatives() -> list[tuple[str, Callable[[str], list[str]]]]:
    """Pairs or single characters alone, and words by jieba where that is installed."""

    def only(length: int) -> Callable[[str], list[str]]:
        return lambda text: [t for t in TOKENIZE(text) if len(t) == length]

    found = [("BM25, pairs of characters", only(2)), ("BM25, single characters", only(1))]
    try:
        import jieba

        found.append(
            ("BM25, words by jieba", lambda text: [w for w in jieba.lcut(text) if w.isalnum()])
        )
    except ImportError:
        pass
    return found


if __name__ == "__main__":
    main()
