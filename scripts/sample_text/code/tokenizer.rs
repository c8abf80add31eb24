//! Splits an arithmetic expression into tokens, and computes it by precedence climbing.

use std::fmt;
use std::iter::Peekable;
use std::str::Chars;

#[derive(Debug, Clone, PartialEq)]
pub enum Token {
    Number(f64),
    Name(String),
    Op(char),
    Open,
    Close,
}

#[derive(Debug, PartialEq)]
pub enum ExprError {
    UnexpectedChar(char),
    UnexpectedEnd,
    UnexpectedToken(Token),
    UnknownName(String),
    DivisionByZero,
}

impl fmt::Display for ExprError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnexpectedChar(c) => write!(f, "unexpected character {c:?}"),
            Self::UnexpectedEnd => write!(f, "the expression ends too early"),
            Self::UnexpectedToken(t) => write!(f, "unexpected {t:?}"),
            Self::UnknownName(n) => write!(f, "unknown name {n}"),
            Self::DivisionByZero => write!(f, "division by zero"),
        }
    }
}

pub struct Lexer<'a> {
    chars: Peekable<Chars<'a>>,
}

impl<'a> Lexer<'a> {
    pub fn new(text: &'a str) -> Self {
        Self { chars: text.chars().peekable() }
    }

    fn take_while(&mut self, keep: impl Fn(char) -> bool) -> String {
        let mut out = String::new();
        while let Some(&c) = self.chars.peek() {
            if !keep(c) {
                break;
            }
            out.push(c);
            self.chars.next();
        }
        out
    }
}

impl Iterator for Lexer<'_> {
    type Item = Result<Token, ExprError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.take_while(char::is_whitespace);
        let c = *self.chars.peek()?;
        let token = match c {
            '0'..='9' | '.' => {
                let digits = self.take_while(|c| c.is_ascii_digit() || c == '.');
                return Some(digits.parse().map(Token::Number).map_err(|_| ExprError::UnexpectedChar('.')));
            }
            'a'..='z' | 'A'..='Z' => {
                return Some(Ok(Token::Name(self.take_while(char::is_alphanumeric))));
            }
            '+' | '-' | '*' | '/' | '^' => Token::Op(c),
            '(' => Token::Open,
            ')' => Token::Close,
            other => return Some(Err(ExprError::UnexpectedChar(other))),
        };
        self.chars.next();
        Some(Ok(token))
    }
}

pub fn evaluate(text: &str) -> Result<f64, ExprError> {
    let tokens: Vec<Token> = Lexer::new(text).collect::<Result<_, _>>()?;
    let mut rest = tokens.as_slice();
    let value = expression(&mut rest, 0)?;
    match rest.first() {
        None => Ok(value),
        Some(token) => Err(ExprError::UnexpectedToken(token.clone())),
    }
}

fn precedence(op: char) -> (u8, bool) {
    match op {
        '+' | '-' => (1, false),
        '*' | '/' => (2, false),
        _ => (4, true), // powers group to the right
    }
}

fn expression(rest: &mut &[Token], least: u8) -> Result<f64, ExprError> {
    let mut left = operand(rest)?;
    while let Some(&Token::Op(op)) = rest.first() {
        let (level, right) = precedence(op);
        if level < least {
            break;
        }
        *rest = &rest[1..];
        let value = expression(rest, if right { level } else { level + 1 })?;
        left = match op {
            '+' => left + value,
            '-' => left - value,
            '*' => left * value,
            '/' if value == 0.0 => return Err(ExprError::DivisionByZero),
            '/' => left / value,
            _ => left.powf(value),
        };
    }
    Ok(left)
}

fn operand(rest: &mut &[Token]) -> Result<f64, ExprError> {
    let (token, tail) = rest.split_first().ok_or(ExprError::UnexpectedEnd)?;
    *rest = tail;
    match token {
        Token::Number(value) => Ok(*value),
        Token::Name(name) if name == "pi" => Ok(std::f64::consts::PI),
        Token::Name(name) => Err(ExprError::UnknownName(name.clone())),
        Token::Op('-') => Ok(-expression(rest, 3)?),
        Token::Open => {
            let value = expression(rest, 0)?;
            match rest.split_first() {
                Some((Token::Close, tail)) => {
                    *rest = tail;
                    Ok(value)
                }
                Some((other, _)) => Err(ExprError::UnexpectedToken(other.clone())),
                None => Err(ExprError::UnexpectedEnd),
            }
        }
        other => Err(ExprError::UnexpectedToken(other.clone())),
    }
}
