//! Disconnects clients that read too slowly: those that read nothing, and those that read a little now and then.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep};

use super::client_lag::ClientLag;

/// Minimum average read rate in bytes per second.
pub const MIN_RATE: u32 = 32 << 10;

/// A stream whose writes may block for a limited time in total. The bytes written earn back time at [`MIN_RATE`].
pub struct WriteTimeout<S> {
    stream: S,
    limit: Duration,
    /// Blocked time so far, minus the time earned by bytes written.
    waited: Duration,
    waiting: Option<Instant>,
    end: Pin<Box<Sleep>>,
    lag: Arc<ClientLag>,
}

impl<S> WriteTimeout<S> {
    /// Writes may block for `limit` in total.
    pub fn new(stream: S, limit: Duration, lag: Arc<ClientLag>) -> Self {
        Self {
            stream,
            limit,
            waited: Duration::ZERO,
            waiting: None,
            end: Box::pin(sleep(limit)),
            lag,
        }
    }

    /// Accounts for the outcome of a write; an error if writes have blocked for too long.
    fn account(
        &mut self,
        outcome: Poll<io::Result<usize>>,
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<usize>> {
        if let Poll::Ready(taken) = &outcome {
            self.wrote(taken.as_ref().map_or(0, |bytes| *bytes));
            return outcome;
        }
        if self.waiting.is_none() {
            let now = Instant::now();
            self.waiting = Some(now);
            self.lag.set_behind(now);
            let left = self.limit.saturating_sub(self.waited);
            self.end.as_mut().reset(now + left);
        }
        self.end.as_mut().poll(cx).map(|()| {
            self.lag.mark_too_slow();
            Err(io::ErrorKind::TimedOut.into())
        })
    }

    fn wrote(&mut self, bytes: usize) {
        if let Some(since) = self.waiting.take() {
            self.waited += since.elapsed();
        }
        let earned = Duration::from_secs_f64(bytes as f64 / f64::from(MIN_RATE));
        self.waited = self.waited.saturating_sub(earned);
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for WriteTimeout<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for WriteTimeout<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let outcome = Pin::new(&mut self.stream).poll_write(cx, buf);
        self.account(outcome, cx)
    }

    /// Forwards vectored writes, so that bodies are not copied.
    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let outcome = Pin::new(&mut self.stream).poll_write_vectored(cx, bufs);
        self.account(outcome, cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let outcome = Pin::new(&mut self.stream).poll_flush(cx).map_ok(|()| 0);
        let outcome = self.account(outcome, cx).map_ok(drop);
        if outcome.is_ready() {
            self.lag.set_caught_up();
        }
        outcome
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let outcome = Pin::new(&mut self.stream).poll_shutdown(cx).map_ok(|()| 0);
        self.account(outcome, cx).map_ok(drop)
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use tokio::net::UnixStream;

    use super::*;

    /// Reads `all` bytes in parts, with a pause before each.
    fn reading(
        far: UnixStream,
        all: usize,
        part: usize,
        pause: Duration,
    ) -> tokio::task::JoinHandle<UnixStream> {
        tokio::spawn(async move {
            let (mut taken, mut buffer) = (0, vec![0; part]);
            while taken < all {
                sleep(pause).await;
                far.readable().await.unwrap();
                taken += far.try_read(&mut buffer).unwrap_or(0);
            }
            far
        })
    }

    /// Writes until the client is disconnected; bytes written, and the error.
    async fn written(stream: &mut WriteTimeout<UnixStream>) -> (usize, io::Error) {
        let (mut written, part) = (0, vec![0; 16 << 10]);
        loop {
            match poll_fn(|cx| Pin::new(&mut *stream).poll_write(cx, &part)).await {
                Ok(bytes) => written += bytes,
                Err(error) => return (written, error),
            }
        }
    }

    #[tokio::test]
    async fn a_client_is_cut_when_it_stops_reading_and_not_before() {
        const PART: usize = 16 << 10;
        const PARTS: usize = 80;
        let (near, far) = UnixStream::pair().unwrap();
        let mut stream = WriteTimeout::new(near, Duration::from_millis(300), Arc::default());
        let reading = reading(far, PARTS * PART, PART, Duration::from_millis(5));
        let (written, error) = written(&mut stream).await;
        let _far = reading.await.unwrap();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert!(written >= PARTS * PART, "{written}");
    }

    #[tokio::test]
    async fn a_client_below_the_minimum_rate_is_cut() {
        let (near, far) = UnixStream::pair().unwrap();
        let limit = Duration::from_secs(1);
        let mut stream = WriteTimeout::new(near, limit, Arc::default());
        // 10 kB/s: each pause alone is far below the limit.
        let reading = reading(far, usize::MAX, 1000, limit / 10);
        let (_, error) = tokio::time::timeout(limit * 10, written(&mut stream))
            .await
            .expect("it is cut");
        reading.abort();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }

    #[tokio::test]
    async fn a_reader_is_behind_until_everything_is_sent() {
        let (near, far) = UnixStream::pair().unwrap();
        let lag = Arc::<ClientLag>::default();
        let mut stream = WriteTimeout::new(near, Duration::from_mins(1), Arc::clone(&lag));
        let writing = tokio::time::timeout(Duration::from_millis(50), written(&mut stream));
        assert!(writing.await.is_err());
        assert!(lag.behind_since().is_some());
        // It reads a little, but not all.
        far.readable().await.unwrap();
        far.try_read(&mut [0; 8 << 10]).unwrap();
        assert!(lag.behind_since().is_some());
        poll_fn(|cx| Pin::new(&mut stream).poll_flush(cx))
            .await
            .unwrap();
        assert!(lag.behind_since().is_none());
    }
}
