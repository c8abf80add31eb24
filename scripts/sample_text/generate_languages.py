"""Notices, forecasts and short talks in ten languages, with seeded numbers."""

# ruff: noqa: E501  (templates keep the lines of their text)
import random
from collections.abc import Iterator

PER_LANGUAGE = 6
SENTENCES: dict[str, tuple[tuple[str, ...], ...]] = {
    "German": (
        ("Im {d}. Stock des Rathauses ist seit {y} eine Ausstellung zu sehen.", "Der Wochenmarkt findet künftig auch am Mittwoch statt, von {h} bis {k} Uhr.", "Wegen einer Störung fallen heute {d} Züge der Linie {n} aus."),
        ("Der Eintritt kostet {p} Euro, Kinder zahlen die Hälfte.", "Gemeldet haben sich bisher {n} Freiwillige, gebraucht werden doppelt so viele.", "Rund {n} Personen warteten am Bahnsteig {d}, die meisten geduldig."),
        ("»Damit hatten wir nicht gerechnet«, sagte die Leiterin, »aber wir freuen uns.«", "Ob sich das ändert, entscheidet der Ausschuss in {d} Wochen.", "Im Jahr {y} waren es noch {n} gewesen."),
        ("Wer mitmachen möchte, kommt am Samstag um {h} Uhr zum alten Tor und bringt Handschuhe mit.", "Nähere Auskunft gibt es im Büro, Zimmer {n}.", "Fahrkarten behalten ihre Gültigkeit bis {k} Uhr."),
    ),
    "French": (
        ("Le musée de la mer rouvre après {d} mois de travaux.", "La bibliothèque prêtera désormais {d} livres à la fois.", "Un orage a coupé le courant dans {n} foyers de la vallée."),
        ("L’entrée coûte {p} euros, mais elle est gratuite le premier dimanche du mois.", "Depuis {y}, le nombre des abonnés a augmenté de {n} pour cent.", "Les équipes ont travaillé toute la nuit, de {k} heures jusqu’à l’aube."),
        ("« Nous avons tout refait, sauf l’escalier », explique l’architecte.", "Personne n’a été blessé, et l’on ne déplore que des dégâts légers.", "Il faudra encore attendre {d} semaines pour connaître les résultats."),
        ("Les inscriptions se font à la mairie, bureau {n}, à partir de {h} heures.", "Une réunion publique aura lieu jeudi à {k} heures dans la salle des fêtes.", "Les enfants doivent être accompagnés d’un adulte."),
    ),
    "Spanish": (
        ("El mercado de la plaza cumple {n} años y lo celebra con música.", "Desde {y} no se recordaba un invierno tan seco.", "La línea {d} de autobuses tendrá una parada nueva junto al hospital."),
        ("Los puestos abrirán a las {h} y habrá descuentos hasta las {k}.", "El embalse está al {n} por ciento de su capacidad.", "El billete costará {p} euros, y los mayores viajarán gratis."),
        ("«Es poco, pero es un comienzo», dijo una vecina.", "Los agricultores piden que se reparen las acequias antes de {d} meses.", "El ayuntamiento espera unos {n} viajeros más al día."),
        ("Quien quiera participar puede apuntarse en la oficina número {d}.", "La decisión se tomará dentro de {d} semanas.", "En caso de lluvia, el acto se aplazará al domingo."),
    ),
    "Italian": (
        ("Il sentiero del lago è di nuovo aperto dopo {d} mesi.", "La scuola di via dei Mulini avrà {n} alunni in più.", "Sabato alle {h} parte la corsa lungo il fiume."),
        ("I volontari hanno raccolto {n} sacchi di rifiuti e rimesso i cartelli.", "Servono {d} aule nuove, e i lavori dureranno almeno un anno.", "L’iscrizione costa {p} euro e comprende il pranzo."),
        ("«Non ci aspettavamo tanta gente», ha detto il sindaco.", "L’edificio fu costruito nel {y} come filanda.", "Chi arriva dopo le {k} troverà il cancello chiuso."),
        ("Per informazioni rivolgersi allo sportello {d}.", "In caso di pioggia si rimanda di una settimana.", "I posti sono limitati a {n}."),
    ),
    "Portuguese": (
        ("A ponte velha fecha ao trânsito durante {d} semanas.", "O festival de teatro recebe este ano {n} companhias.", "Choveu em dois dias mais do que em todo o mês de maio de {y}."),
        ("Os automobilistas devem seguir pela marginal até às {k} horas.", "Os bilhetes custam {p} euros e já estão à venda.", "Os bombeiros responderam a {n} pedidos de ajuda."),
        ("«Preferimos fazer as obras agora, antes do inverno», explicou o engenheiro.", "A sala tem apenas {n} lugares.", "Não houve feridos, mas {d} casas ficaram sem telhado."),
        ("Mais informações no balcão {d}, a partir das {h} horas.", "O programa completo será publicado na quinta-feira.", "A situação deve voltar ao normal dentro de {d} dias."),
    ),
    "Russian": (
        ("С понедельника библиотека работает с {h} до {k} часов.", "В этом году в школе открылись {d} новых кружков.", "Мост через реку построили в {y} году."),
        ("Билет стоит {p} рублей, детям скидка.", "Записались уже {n} человек, места ещё есть.", "За последние {d} лет его ремонтировали дважды."),
        ("«Мы давно этого ждали», — сказала одна из посетительниц.", "Подробности можно узнать в кабинете номер {n}.", "Движение закроют на {d} недель."),
        ("Если пойдёт дождь, праздник перенесут на воскресенье.", "Просьба не опаздывать.", "О результатах сообщат через {d} дней."),
    ),
    "Chinese": (
        ("博物馆从本月起每天{h}点开门。", "新地铁线全长{n}公里，共有{d}个车站。", "这座桥建于{y}年，最近重新开放。"),
        ("门票{p}元，学生半价。", "预计每天有{n}万人次乘坐。", "工程一共用了{d}个月。"),
        ("“没想到来的人这么多。”一位工作人员说。", "附近的居民表示，以后出门方便多了。", "专家建议再增加{d}个出口。"),
        ("详情请到{d}号窗口咨询。", "如遇下雨，活动改到下周日。", "报名截止时间为星期五{k}点。"),
    ),
    "Japanese": (
        ("市立図書館は来月から午前{h}時に開館します。", "この橋は{y}年に完成しました。", "今年の運動会には{n}人が参加しました。"),
        ("入場料は大人{p}円、子どもは無料です。", "工事は{d}週間ほどかかる見込みです。", "去年より{d}人多いそうです。"),
        ("「とても楽しみにしています」と近所の人は話していました。", "詳しいことは{d}番の窓口でお尋ねください。", "駅から歩いて{n}分です。"),
        ("雨の場合は中止になります。", "申し込みは金曜日の{k}時までです。", "車での来場はご遠慮ください。"),
    ),
    "Arabic": (
        ("تفتح المكتبة أبوابها من الساعة {h} حتى الساعة {k}.", "شارك في السباق هذا العام {n} عداء.", "بني هذا الجسر عام {y} ورمم مؤخرا."),
        ("ثمن التذكرة {p} دراهم، والأطفال يدخلون مجانا.", "استمر العمل {d} أشهر.", "ارتفع عدد الزوار بنسبة {n} في المئة."),
        ("قالت إحدى الحاضرات: لم نتوقع هذا العدد من الناس.", "ومن أراد المشاركة فليسجل اسمه في المكتب رقم {d}.", "وسيعلن عن النتائج بعد {d} أسابيع."),
        ("وإذا نزل المطر تؤجل الحفلة إلى يوم الجمعة.", "الأماكن محدودة.", "نرجو من الجميع الحضور في الموعد."),
    ),
    "Hindi": (
        ("पुस्तकालय अब सुबह {h} बजे खुलेगा।", "यह पुल सन् {y} में बना था।", "इस वर्ष दौड़ में {n} लोगों ने भाग लिया।"),
        ("टिकट {p} रुपये का है, बच्चों के लिए प्रवेश मुफ़्त है।", "मरम्मत में {d} महीने लगे।", "पिछले साल से {d} लोग अधिक आए।"),
        ("एक दर्शक ने कहा, \"हमें इतनी भीड़ की आशा नहीं थी।\"", "अधिक जानकारी के लिए खिड़की नंबर {d} पर पूछें।", "परिणाम {d} दिनों में बताए जाएँगे।"),
        ("वर्षा होने पर कार्यक्रम रविवार को होगा।", "कृपया समय पर आएँ।", "स्थान सीमित हैं।"),
    ),
}  # fmt: skip


def documents() -> Iterator[tuple[str, list[str]]]:
    """Yield each language and short reports in it; some of their sentences begin the same."""
    for language, positions in SENTENCES.items():
        rng = random.Random(language)
        orders = [rng.sample(choices, len(choices)) for choices in positions]
        reports = []
        for number in range(PER_LANGUAGE):
            sentences = [choices[(number + number // 3 * at) % len(choices)] for at, choices in enumerate(orders)]
            reports.append(
                ("" if language in ("Chinese", "Japanese") else " ").join(
                    _fill(sentence, rng) for sentence in sentences
                )
            )
        yield language.lower(), ["\n\n".join(reports)]


def _fill(sentence: str, rng: random.Random) -> str:
    return sentence.format(
        d=rng.randint(2, 9), n=rng.randint(11, 98), y=rng.randint(1850, 2005), h=rng.randint(8, 11), k=rng.randint(13, 21),
        p=rng.choice((5, 8, 10, 12, 15)),
    )  # fmt: skip
