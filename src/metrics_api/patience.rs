//! Cuts a client that takes nothing of what it is sent: a watcher that doesn't read.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep};

/// A stream of which no write waits for longer than a time.
pub struct Patience<S> {
    stream: S,
    most: Duration,
    waiting: bool,
    end: Pin<Box<Sleep>>,
}

impl<S> Patience<S> {
    /// Writes wait for at most so long.
    pub fn new(stream: S, most: Duration) -> Self {
        Self {
            stream,
            most,
            waiting: false,
            end: Box::pin(sleep(most)),
        }
    }

    /// What came of a write, or that it waited for too long.
    fn judge<T>(
        &mut self,
        outcome: Poll<io::Result<T>>,
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<T>> {
        if outcome.is_ready() {
            self.waiting = false;
            return outcome;
        }
        if !self.waiting {
            self.waiting = true;
            self.end.as_mut().reset(Instant::now() + self.most);
        }
        self.end
            .as_mut()
            .poll(cx)
            .map(|()| Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Patience<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Patience<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let outcome = Pin::new(&mut self.stream).poll_write(cx, buf);
        self.judge(outcome, cx)
    }

    /// A body goes to the stream as it is, rather than by way of one more buffer.
    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let outcome = Pin::new(&mut self.stream).poll_write_vectored(cx, bufs);
        self.judge(outcome, cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let outcome = Pin::new(&mut self.stream).poll_flush(cx);
        self.judge(outcome, cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let outcome = Pin::new(&mut self.stream).poll_shutdown(cx);
        self.judge(outcome, cx)
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use tokio::net::UnixStream;

    use super::*;

    #[tokio::test]
    async fn who_takes_nothing_is_cut_and_who_takes_a_little_is_not() {
        const PART: usize = 16 << 10;
        const PARTS: usize = 80;
        let (near, far) = UnixStream::pair().unwrap();
        let mut stream = Patience::new(near, Duration::from_millis(300));
        let reading = tokio::spawn(async move {
            let mut taken = 0;
            while taken < PARTS * PART {
                sleep(Duration::from_millis(5)).await;
                far.readable().await.unwrap();
                taken += far.try_read(&mut [0; PART]).unwrap_or(0);
            }
            far
        });
        let mut written = 0;
        let error = loop {
            let part = [0; PART];
            match poll_fn(|cx| Pin::new(&mut stream).poll_write(cx, &part)).await {
                Ok(bytes) => written += bytes,
                Err(error) => break error,
            }
        };
        let _far = reading.await.unwrap();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert!(written >= PARTS * PART, "{written}");
    }
}
