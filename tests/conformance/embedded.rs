//! The embedded queue in both dialects, on a manual clock.

use std::sync::Arc;
use std::time::Duration;

use journeyman::source::taskcluster::{Credentials, Dialect};
use journeyman_services::queue::{self, Db, QueueClock, RegisteredClient};

use crate::conformance::bench::{Adapter, Bench, Fut, Need, Rig, Span};
use crate::conformance::service::{Service, fresh_task_queue};

const LEASE: Duration = Duration::from_secs(60);
const HIDDEN: Duration = Duration::from_secs(30);

pub(crate) fn adapter(dialect: Dialect) -> Adapter {
    Adapter::Present { rigs: vec![Box::new(Embedded { dialect })] }
}

struct Embedded {
    dialect: Dialect,
}

impl Rig for Embedded {
    fn name(&self) -> String {
        match self.dialect {
            Dialect::Azure => "embedded queue, azure".into(),
            Dialect::ClaimWork => "embedded queue, claim-work".into(),
        }
    }

    fn can(&self, need: Need) -> bool {
        let azure = self.dialect == Dialect::Azure;
        match need {
            Need::Messages | Need::Redelivery => azure,
            Need::Waits | Need::Recovery => !azure,
            _ => need != Need::Garbage,
        }
    }

    fn bench(&self) -> Fut<'static, Arc<dyn Bench>> {
        let dialect = self.dialect;
        Box::pin(async move {
            let folder = Arc::new(tempfile::tempdir().expect("a folder can be made"));
            let clock = QueueClock::manual(jiff::Timestamp::now().as_millisecond());
            let mut settings = queue::Config::new(Db::Memory, folder.path().join("artifacts"));
            let token = "conformance-token";
            let scopes = vec!["*".to_owned()];
            settings.clients =
                vec![RegisteredClient { client_id: "conformance".into(), access_token: token.into(), scopes }];
            settings.claim_timeout = LEASE;
            settings.claim_delay = Duration::ZERO;
            settings.visibility_timeout = HIDDEN;
            settings.clock = clock.clone();
            let running = Arc::new(queue::start(settings).await.expect("the queue starts"));
            let service = Service {
                root_url: running.root_url().to_owned(),
                credentials: Credentials::new("conformance", token.into(), None).expect("they can sign"),
                dialect,
            };
            // Signatures use the host's clock, so the sum must stay below the tolerated 15 minutes.
            let pass = move |span| -> Fut<'static, ()> {
                let span = match span {
                    Span::MostOfALease => LEASE * 2 / 3,
                    Span::ALease => LEASE + Duration::from_secs(1),
                    Span::AHiding => HIDDEN + Duration::from_secs(1),
                };
                clock.advance(span);
                let (running, folder) = (Arc::clone(&running), Arc::clone(&folder));
                Box::pin(async move {
                    running.tick().await;
                    drop(folder);
                })
            };
            Arc::new(service.bench(fresh_task_queue(), Some(Box::new(pass)))) as Arc<dyn Bench>
        })
    }
}
