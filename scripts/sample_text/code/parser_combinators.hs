{-# LANGUAGE LambdaCase #-}
-- | A small parser library, and a parser of lambda terms made with it.
module Lambda where

import Control.Applicative
import Data.Char (isAlpha, isAlphaNum, isSpace)
import Data.List (delete, union)

newtype Parser a = Parser { runParser :: String -> Maybe (a, String) }

instance Functor Parser where
  fmap f (Parser p) = Parser $ \s -> case p s of
    Nothing        -> Nothing
    Just (a, rest) -> Just (f a, rest)

instance Applicative Parser where
  pure a = Parser $ \s -> Just (a, s)
  Parser pf <*> Parser pa = Parser $ \s -> do
    (f, rest)  <- pf s
    (a, rest') <- pa rest
    pure (f a, rest')

instance Monad Parser where
  Parser p >>= f = Parser $ \s -> do
    (a, rest) <- p s
    runParser (f a) rest

instance Alternative Parser where
  empty = Parser (const Nothing)
  Parser p <|> Parser q = Parser $ \s -> p s <|> q s

satisfy :: (Char -> Bool) -> Parser Char
satisfy ok = Parser $ \case
  (c : rest) | ok c -> Just (c, rest)
  _                 -> Nothing

token :: Parser a -> Parser a
token p = p <* many (satisfy isSpace)

symbol :: Char -> Parser Char
symbol = token . satisfy . (==)

data Term
  = Var String
  | Lam String Term
  | App Term Term
  deriving (Eq)

instance Show Term where
  showsPrec _ (Var x)   = showString x
  showsPrec d (Lam x t) = showParen (d > 0) $ showString ("\\" ++ x ++ ". ") . showsPrec 0 t
  showsPrec d (App f a) = showParen (d > 1) $ showsPrec 1 f . showChar ' ' . showsPrec 2 a

name :: Parser String
name = token ((:) <$> satisfy isAlpha <*> many (satisfy isAlphaNum))

term :: Parser Term
term = lambda <|> application
  where
    lambda      = Lam <$> (symbol '\\' *> name) <*> (symbol '.' *> term)
    application = foldl1 App <$> some atom
    atom        = Var <$> name <|> symbol '(' *> term <* symbol ')'

free :: Term -> [String]
free (Var x)   = [x]
free (Lam x t) = delete x (free t)
free (App f a) = free f `union` free a

-- | Replace a variable, renaming bound variables that would capture a free one.
substitute :: String -> Term -> Term -> Term
substitute x new = go
  where
    go v@(Var y)
      | y == x    = new
      | otherwise = v
    go (App f a)  = App (go f) (go a)
    go l@(Lam y t)
      | y == x            = l
      | y `elem` free new = let y' = fresh y (free new ++ free t)
                            in Lam y' (go (substitute y (Var y') t))
      | otherwise         = Lam y (go t)
    fresh y used = head [y' | n <- [1 :: Int ..], let y' = y ++ show n, y' `notElem` used]

-- | One step of normal order reduction, if there is one.
step :: Term -> Maybe Term
step (App (Lam x t) a) = Just (substitute x a t)
step (App f a)         = (`App` a) <$> step f <|> App f <$> step a
step (Lam x t)         = Lam x <$> step t
step (Var _)           = Nothing

normalise :: Int -> Term -> Term
normalise 0 t = t
normalise n t = maybe t (normalise (n - 1)) (step t)
