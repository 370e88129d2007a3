package headrace

import (
	"context"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	headracev1 "headrace.dev/go/headrace/v1"
)

// Model describes the model and the server's limits.
func (c *Client) Model(ctx context.Context) (*headracev1.ModelCard, error) {
	answer, err := anywhere(ctx, c, call[*headracev1.GetModelResponse]{
		send: func(ctx context.Context, at *server, options ...grpc.CallOption) (*headracev1.GetModelResponse, error) {
			return at.models.GetModel(ctx, &headracev1.GetModelRequest{}, options...)
		},
	})
	return answer.GetModel(), err
}

// Adapters lists the adapters that the caller may use, by name; of several servers, those of one.
func (c *Client) Adapters(ctx context.Context) ([]*headracev1.Adapter, error) {
	message := &headracev1.ListAdaptersRequest{PageSize: 1000} // the contract's limit
	var found []*headracev1.Adapter
	for {
		answer, err := anywhere(ctx, c, call[*headracev1.ListAdaptersResponse]{
			send: func(ctx context.Context, at *server, options ...grpc.CallOption) (*headracev1.ListAdaptersResponse, error) {
				return at.models.ListAdapters(ctx, message, options...)
			},
		})
		if err != nil {
			return nil, err
		}
		found = append(found, answer.GetAdapters()...)
		if message.PageToken = answer.GetNextPageToken(); message.PageToken == "" {
			return found, nil
		}
	}
}

// Tokenize returns the token ids of a request's prompt, text or a conversation, exactly as the request would have them.
// What else the request says is not looked at.
func (c *Client) Tokenize(ctx context.Context, request *Request) ([]uint32, error) {
	tokens, err := c.tokenize(ctx, request, false)
	return tokens.GetTokenIds(), err
}

// TokenizeDetails does the same, with each token's text and bytes.
func (c *Client) TokenizeDetails(ctx context.Context, request *Request) ([]Token, error) {
	tokens, err := c.tokenize(ctx, request, true)
	return tokensFrom(tokens.GetTokens()), err
}

func (c *Client) tokenize(ctx context.Context, request *Request, details bool) (*headracev1.TokenizeResponse, error) {
	spec, err := request.build()
	if err != nil {
		return nil, err
	}
	message := &headracev1.TokenizeRequest{TokenDetails: details}
	switch {
	case spec.GetText() != nil:
		message.Input = &headracev1.TokenizeRequest_Text{Text: spec.GetText()}
	case spec.GetChat() != nil:
		message.Input = &headracev1.TokenizeRequest_Chat{Chat: spec.GetChat()}
	default:
		return nil, invalid("token_ids", "are tokenized already")
	}
	message.RequiredCapabilities = requiredBy(message)
	return anywhere(ctx, c, call[*headracev1.TokenizeResponse]{
		send: func(ctx context.Context, at *server, options ...grpc.CallOption) (*headracev1.TokenizeResponse, error) {
			return at.models.Tokenize(ctx, message, options...)
		},
	})
}

// Detokenize returns the text of token ids, without special tokens.
func (c *Client) Detokenize(ctx context.Context, ids []uint32) (string, error) {
	message := &headracev1.DetokenizeRequest{TokenIds: ids}
	answer, err := anywhere(ctx, c, call[*headracev1.DetokenizeResponse]{
		send: func(ctx context.Context, at *server, options ...grpc.CallOption) (*headracev1.DetokenizeResponse, error) {
			return at.models.Detokenize(ctx, message, options...)
		},
	})
	return answer.GetText(), err
}

// Ready tells whether a server is ready for requests. A server that loads its model is not; one that cannot be reached is
// an error.
func (c *Client) Ready(ctx context.Context) (bool, error) {
	answer, err := anywhere(ctx, c, call[*healthpb.HealthCheckResponse]{
		send: func(ctx context.Context, at *server, options ...grpc.CallOption) (*healthpb.HealthCheckResponse, error) {
			return at.health.Check(ctx, &healthpb.HealthCheckRequest{Service: generationService}, options...)
		},
	})
	return answer.GetStatus() == healthpb.HealthCheckResponse_SERVING, err
}

// WaitReady returns once a server is ready for requests, or with an error when the context ends.
func (c *Client) WaitReady(ctx context.Context) error {
	problem := newError(codes.Unavailable, nil, "the server at %s is not ready", c.pool)
	for {
		isReady, err := c.Ready(ctx)
		if isReady {
			return nil
		}
		if known := new(Error); err != nil {
			known, _ = err.(*Error) //nolint:errorlint // what this package returns is not wrapped
			if known.Code != codes.Unavailable && ctx.Err() == nil {
				return err
			}
			if ctx.Err() == nil {
				problem = known
			}
		}
		if wait(ctx, nil, 2*firstPause) != nil {
			ended := contextError(ctx, "")
			ended.Message = ended.Message + ": " + problem.Message
			return ended
		}
	}
}
