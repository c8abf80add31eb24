//! A key-value store in one append-only file.
//!
//! Each record is `crc32 | key length | value length | key | value`, little endian. A value length of `u32::MAX` marks a
//! deletion. Opening the store reads the file once and keeps where each key's latest value lies.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{self, BufReader, Read, Seek, SeekFrom, Write};
use std::path::Path;

const TOMBSTONE: u32 = u32::MAX;
const HEADER: usize = 12;

#[derive(Debug)]
pub enum Error {
    Io(io::Error),
    Damaged { offset: u64 },
}

impl From<io::Error> for Error {
    fn from(error: io::Error) -> Self {
        Error::Io(error)
    }
}

pub type Result<T> = std::result::Result<T, Error>;

#[derive(Clone, Copy)]
struct Slot {
    offset: u64,
    length: u32,
}

pub struct Store {
    file: File,
    index: HashMap<Vec<u8>, Slot>,
    end: u64,
}

impl Store {
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let file = OpenOptions::new().read(true).append(true).create(true).open(path)?;
        let mut store = Store { file, index: HashMap::new(), end: 0 };
        store.load()?;
        Ok(store)
    }

    fn load(&mut self) -> Result<()> {
        let length = self.file.metadata()?.len();
        let mut reader = BufReader::new(&self.file);
        let mut offset = 0u64;
        let mut index = HashMap::new();
        while offset < length {
            let mut header = [0u8; HEADER];
            reader.read_exact(&mut header).map_err(|_| Error::Damaged { offset })?;
            let word = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().unwrap());
            let (checksum, key_len, value_len) = (word(0), word(4), word(8));
            let stored = if value_len == TOMBSTONE { 0 } else { value_len };
            let mut body = vec![0u8; key_len as usize + stored as usize];
            reader.read_exact(&mut body).map_err(|_| Error::Damaged { offset })?;
            if crc32(&body) != checksum {
                return Err(Error::Damaged { offset });
            }
            let key = body[..key_len as usize].to_vec();
            if value_len == TOMBSTONE {
                index.remove(&key);
            } else {
                let at = offset + HEADER as u64 + u64::from(key_len);
                index.insert(key, Slot { offset: at, length: value_len });
            }
            offset += (HEADER + body.len()) as u64;
        }
        self.index = index;
        self.end = offset;
        Ok(())
    }

    pub fn get(&mut self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        let Some(slot) = self.index.get(key).copied() else {
            return Ok(None);
        };
        let mut value = vec![0u8; slot.length as usize];
        self.file.seek(SeekFrom::Start(slot.offset))?;
        self.file.read_exact(&mut value)?;
        Ok(Some(value))
    }

    pub fn put(&mut self, key: &[u8], value: &[u8]) -> Result<()> {
        let at = self.append(key, Some(value))?;
        self.index.insert(key.to_vec(), Slot { offset: at, length: value.len() as u32 });
        Ok(())
    }

    pub fn delete(&mut self, key: &[u8]) -> Result<bool> {
        if self.index.remove(key).is_none() {
            return Ok(false);
        }
        self.append(key, None)?;
        Ok(true)
    }

    fn append(&mut self, key: &[u8], value: Option<&[u8]>) -> Result<u64> {
        let mut body = key.to_vec();
        body.extend_from_slice(value.unwrap_or_default());
        let mut record = Vec::with_capacity(HEADER + body.len());
        record.extend_from_slice(&crc32(&body).to_le_bytes());
        record.extend_from_slice(&(key.len() as u32).to_le_bytes());
        record.extend_from_slice(&value.map_or(TOMBSTONE, |v| v.len() as u32).to_le_bytes());
        record.extend_from_slice(&body);
        self.file.write_all(&record)?;
        let at = self.end + (HEADER + key.len()) as u64;
        self.end += record.len() as u64;
        Ok(at)
    }
}

fn crc32(bytes: &[u8]) -> u32 {
    let mut crc = !0u32;
    for &byte in bytes {
        crc ^= u32::from(byte);
        for _ in 0..8 {
            crc = if crc & 1 == 1 { (crc >> 1) ^ 0xedb8_8320 } else { crc >> 1 };
        }
    }
    !crc
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_is_the_usual_one() {
        assert_eq!(crc32(b"123456789"), 0xcbf4_3926);
    }

    #[test]
    fn what_was_put_is_found_after_opening_again() {
        let path = std::env::temp_dir().join("kvstore-test");
        let _ = std::fs::remove_file(&path);
        {
            let mut store = Store::open(&path).unwrap();
            store.put(b"colour", b"green").unwrap();
            store.put(b"colour", b"blue").unwrap();
            store.put(b"size", b"large").unwrap();
            assert!(store.delete(b"size").unwrap());
        }
        let mut store = Store::open(&path).unwrap();
        assert_eq!(store.get(b"colour").unwrap().as_deref(), Some(&b"blue"[..]));
        assert_eq!(store.get(b"size").unwrap(), None);
    }
}
