-- A lending library: books, copies, members, loans and fines.
BEGIN;

CREATE TABLE author (
    author_id   integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name        text NOT NULL,
    born        smallint CHECK (born BETWEEN 1000 AND 2100),
    UNIQUE (name, born)
);

CREATE TABLE book (
    isbn        char(13) PRIMARY KEY CHECK (isbn ~ '^[0-9]{13}$'),
    title       text NOT NULL,
    published   smallint NOT NULL,
    language    char(2) NOT NULL DEFAULT 'en'
);

CREATE TABLE book_author (
    isbn        char(13) REFERENCES book ON DELETE CASCADE,
    author_id   integer REFERENCES author,
    position    smallint NOT NULL DEFAULT 1,
    PRIMARY KEY (isbn, author_id)
);

CREATE TABLE copy (
    copy_id     integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    isbn        char(13) NOT NULL REFERENCES book,
    shelf       text NOT NULL,
    acquired    date NOT NULL DEFAULT current_date,
    withdrawn   date,
    CHECK (withdrawn IS NULL OR withdrawn >= acquired)
);

CREATE TABLE member (
    member_id   integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name        text NOT NULL,
    joined      date NOT NULL DEFAULT current_date,
    kind        text NOT NULL DEFAULT 'adult' CHECK (kind IN ('child', 'adult', 'staff'))
);

CREATE TABLE loan (
    loan_id     bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    copy_id     integer NOT NULL REFERENCES copy,
    member_id   integer NOT NULL REFERENCES member,
    lent        timestamptz NOT NULL DEFAULT now(),
    due         date NOT NULL,
    returned    timestamptz
);

-- A copy is lent to one member at a time.
CREATE UNIQUE INDEX loan_open ON loan (copy_id) WHERE returned IS NULL;
CREATE INDEX loan_by_member ON loan (member_id, lent DESC);

CREATE VIEW overdue AS
SELECT m.member_id, m.name, b.title, l.due, current_date - l.due AS days_late,
       least(0.20 * (current_date - l.due), 10.00)::numeric(6, 2) AS fine
FROM loan l
JOIN member m USING (member_id)
JOIN copy c USING (copy_id)
JOIN book b USING (isbn)
WHERE l.returned IS NULL AND l.due < current_date;

COMMIT;

-- The ten books lent most often this year, with the average days that they stay out.
SELECT b.title,
       string_agg(DISTINCT a.name, ', ' ORDER BY a.name) AS authors,
       count(DISTINCT l.loan_id)                         AS loans,
       round(avg(extract(epoch FROM coalesce(l.returned, now()) - l.lent) / 86400)::numeric, 1) AS days_out
FROM loan l
JOIN copy c USING (copy_id)
JOIN book b USING (isbn)
JOIN book_author ba USING (isbn)
JOIN author a USING (author_id)
WHERE l.lent >= date_trunc('year', current_date)
GROUP BY b.isbn, b.title
ORDER BY loans DESC, b.title
LIMIT 10;

-- Members who have borrowed in every one of the last three months.
WITH months AS (
    SELECT member_id, date_trunc('month', lent) AS month
    FROM loan
    WHERE lent >= date_trunc('month', current_date) - interval '3 months'
      AND lent <  date_trunc('month', current_date)
    GROUP BY 1, 2
)
SELECT name, joined
FROM member
WHERE member_id IN (SELECT member_id FROM months GROUP BY member_id HAVING count(*) = 3)
ORDER BY joined;

-- Rank copies of each book by how worn they are likely to be.
SELECT isbn, copy_id, shelf, loans,
       rank() OVER (PARTITION BY isbn ORDER BY loans DESC) AS most_used,
       loans::float / nullif(sum(loans) OVER (PARTITION BY isbn), 0) AS share
FROM (
    SELECT c.isbn, c.copy_id, c.shelf, count(l.loan_id) AS loans
    FROM copy c LEFT JOIN loan l USING (copy_id)
    WHERE c.withdrawn IS NULL
    GROUP BY c.isbn, c.copy_id, c.shelf
) AS used
ORDER BY isbn, most_used;
