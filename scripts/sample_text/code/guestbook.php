<?php

declare(strict_types=1);

namespace App\Guestbook;

use DateTimeImmutable;
use PDO;

final class Entry
{
    public function __construct(
        public readonly int $id,
        public readonly string $author,
        public readonly string $message,
        public readonly DateTimeImmutable $written,
    ) {
    }
}

final class Repository
{
    public function __construct(private readonly PDO $database)
    {
        $this->database->setAttribute(PDO::ATTR_ERRMODE, PDO::ERRMODE_EXCEPTION);
        $this->database->exec(
            'CREATE TABLE IF NOT EXISTS entry (
                id INTEGER PRIMARY KEY AUTOINCREMENT,
                author TEXT NOT NULL,
                message TEXT NOT NULL,
                written TEXT NOT NULL
            )'
        );
    }

    public function add(string $author, string $message): int
    {
        $insert = $this->database->prepare(
            'INSERT INTO entry (author, message, written) VALUES (:author, :message, :written)'
        );
        $insert->execute([
            'author' => $author,
            'message' => $message,
            'written' => (new DateTimeImmutable())->format(DATE_ATOM),
        ]);

        return (int) $this->database->lastInsertId();
    }

    /** @return list<Entry> */
    public function latest(int $limit = 20): array
    {
        $select = $this->database->prepare('SELECT * FROM entry ORDER BY id DESC LIMIT :limit');
        $select->bindValue('limit', $limit, PDO::PARAM_INT);
        $select->execute();

        return array_map(
            static fn (array $row): Entry => new Entry(
                (int) $row['id'],
                $row['author'],
                $row['message'],
                new DateTimeImmutable($row['written']),
            ),
            $select->fetchAll(PDO::FETCH_ASSOC),
        );
    }
}

/** @return array<string, string> what is wrong, by field */
function validate(array $form): array
{
    $errors = [];
    if (trim($form['author'] ?? '') === '') {
        $errors['author'] = 'Please give a name.';
    }
    $length = mb_strlen(trim($form['message'] ?? ''));
    if ($length < 3 || $length > 500) {
        $errors['message'] = 'A message has between 3 and 500 characters.';
    }

    return $errors;
}

$repository = new Repository(new PDO('sqlite:' . __DIR__ . '/guestbook.sqlite'));
$errors = [];
if ($_SERVER['REQUEST_METHOD'] === 'POST') {
    $errors = validate($_POST);
    if ($errors === []) {
        $repository->add(trim($_POST['author']), trim($_POST['message']));
        header('Location: ' . $_SERVER['PHP_SELF'], true, 303);
        exit;
    }
}
?>
<!doctype html>
<title>Guest book</title>
<form method="post">
    <input name="author" value="<?= htmlspecialchars($_POST['author'] ?? '') ?>">
    <?php if (isset($errors['author'])): ?><em><?= $errors['author'] ?></em><?php endif ?>
    <textarea name="message"><?= htmlspecialchars($_POST['message'] ?? '') ?></textarea>
    <?php if (isset($errors['message'])): ?><em><?= $errors['message'] ?></em><?php endif ?>
    <button>Write</button>
</form>
<?php foreach ($repository->latest() as $entry): ?>
    <article>
        <h3><?= htmlspecialchars($entry->author) ?></h3>
        <time><?= $entry->written->format('j F Y, H:i') ?></time>
        <p><?= nl2br(htmlspecialchars($entry->message)) ?></p>
    </article>
<?php endforeach ?>
